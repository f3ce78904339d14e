"""Tokens in, tokens and log-probs out."""

from TrainingFactory.sampling.native import NativeEngine

__all__ = ["NativeEngine"]
