"""Import path of the DeepSeek model class."""

from TrainingFactory.models.faces import DeepSeekModel as DeepSeekModel
