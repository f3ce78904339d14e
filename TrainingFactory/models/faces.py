"""Name models by family: a model with its chat layer, for people who write `Qwen3Model("qwen3-4b")`."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from TrainingFactory.models.chat import TemplateChatFormat, chat_format
from TrainingFactory.models.loading import LoadedModel, load_model


class ModelFace:
    """Loads the model on first use, so that naming one costs nothing."""

    family: ClassVar[str | None] = None

    def __init__(self, name: str, *, thinking: bool | None = None, **options: Any) -> None:
        self.name = name
        self._thinking = thinking
        self._options = options  # as `load_model` takes them

    @property
    def section(self) -> dict[str, Any]:
        """Return the model as a config names it."""
        found = {"name": self.name, "family": self.family, "thinking": self._thinking, **self._options}
        return {key: value for key, value in found.items() if value is not None}

    @cached_property
    def loaded(self) -> LoadedModel:
        return load_model(self.name, **self._options)

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        return self.loaded.tokenizer

    @cached_property
    def chat(self) -> TemplateChatFormat:
        stops = self.loaded.stop_ids
        return chat_format(self.tokenizer, self.family, thinking=self._thinking, stop_ids=stops)


class Qwen3Model(ModelFace):
    """Qwen3; `thinking=False` has the template close the thought before the model writes."""

    family = "qwen3"


class LlamaModel(ModelFace):
    """Llama 3.x."""

    family = "llama3"


class DeepSeekModel(ModelFace):
    """DeepSeek V3 and the R1 distils."""

    family = "deepseek"
