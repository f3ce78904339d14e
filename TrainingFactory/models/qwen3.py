"""Qwen3 by its family name."""

from TrainingFactory.models.faces import ModelFace


class Qwen3Model(ModelFace):
    """Qwen3; `thinking=False` has the template close the thought before the model writes."""

    family = "qwen3"
