"""Sampling engines: token ids in, token ids and log-probs out. `NativeEngine` is imported on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TrainingFactory.sampling.native import NativeEngine as NativeEngine


def __getattr__(name: str) -> Any:
    if name != "NativeEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from TrainingFactory.sampling.native import NativeEngine

    return NativeEngine
