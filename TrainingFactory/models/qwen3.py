"""Qwen3 by its family name."""

from TrainingFactory.models.faces import Qwen3Model as Qwen3Model
