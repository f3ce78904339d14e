"""The model registry."""

from TrainingFactory.promotion.model_registry import ModelRegistry

__all__ = ["ModelRegistry"]
