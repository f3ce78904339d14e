"""Import path of the Qwen3 model class."""

from TrainingFactory.models.faces import Qwen3Model as Qwen3Model
