"""Make the engine that a spec describes, in the process that is to sample."""

from __future__ import annotations

from TrainingFactory.protocols import Engine
from TrainingFactory.types import EngineSpec


def make_engine(spec: EngineSpec) -> Engine:
    """Make the engine in this process; it samples after `start`."""
    if spec.kind == "vllm":
        from TrainingFactory.sampling.vllm_engine import VllmEngine

        return VllmEngine(spec)
    from TrainingFactory.cluster.native_host import NativeHost

    return NativeHost(spec)
