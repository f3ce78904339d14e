"""Llama by its family name."""

from TrainingFactory.models.faces import ModelFace


class LlamaModel(ModelFace):
    """Llama 3.x."""

    family = "llama3"
