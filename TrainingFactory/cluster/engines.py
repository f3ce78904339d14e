"""Make the engine that a spec describes, in the process that is to sample."""

from __future__ import annotations

from importlib import import_module

from TrainingFactory.protocols import Engine
from TrainingFactory.types import EngineSpec

ENGINES = {
    "native": "TrainingFactory.cluster.native_host:NativeHost",
    "vllm": "TrainingFactory.sampling.vllm_engine:VllmEngine",
}


def make_engine(spec: EngineSpec) -> Engine:
    """Make the engine in this process; it samples after `start`."""
    module, _, name = ENGINES.get(spec.kind, spec.kind).partition(":")
    return getattr(import_module(module), name)(spec)
