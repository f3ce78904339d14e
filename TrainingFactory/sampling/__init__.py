"""Tokens in, tokens and log-probs out."""

from TrainingFactory.sampling.native import EngineStats, NativeEngine

__all__ = ["EngineStats", "NativeEngine"]
