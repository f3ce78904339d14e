"""Factory of sampling engines, called in the process that runs the engine."""

from __future__ import annotations

from importlib import import_module

from TrainingFactory.protocols import Engine
from TrainingFactory.types import EngineSpec

ENGINE_CLASSES = {
    "native": "TrainingFactory.cluster.native_host:NativeHost",
    "vllm": "TrainingFactory.sampling.vllm_engine:VllmEngine",
}


def make_engine(spec: EngineSpec) -> Engine:
    """Create the engine of a spec in this process; call its `start` before sampling."""
    module, _, function_name = ENGINE_CLASSES.get(spec.kind, spec.kind).partition(":")
    return getattr(import_module(module), function_name)(spec)
