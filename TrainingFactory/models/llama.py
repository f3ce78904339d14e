"""Llama by its family name."""

from TrainingFactory.models.faces import LlamaModel as LlamaModel
