"""DeepSeek by its family name."""

from TrainingFactory.models.faces import DeepSeekModel as DeepSeekModel
