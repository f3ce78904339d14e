"""DeepSeek by its family name."""

from TrainingFactory.models.faces import ModelFace


class DeepSeekModel(ModelFace):
    """DeepSeek V3 and the R1 distils."""

    family = "deepseek"
