"""Import path of the Llama model class."""

from TrainingFactory.models.faces import LlamaModel as LlamaModel
