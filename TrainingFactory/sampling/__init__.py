"""Tokens in, tokens and log-probs out. Torch is imported when an engine is asked for, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TrainingFactory.sampling.native import EngineStats, NativeEngine

__all__ = ["EngineStats", "NativeEngine"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from TrainingFactory.sampling import native

        return getattr(native, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
