"""One class per model family, with model, tokenizer and chat format: `Qwen3Model("qwen3-4b")`."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from TrainingFactory.models.chat import TemplateChatFormat, chat_format
from TrainingFactory.models.loading import LoadedModel, load_model


class FamilyModel:
    """Base class of the model families: a named model that is loaded when one of its attributes is first used."""

    family: ClassVar[str | None] = None

    def __init__(self, name: str, *, thinking: bool | None = None, **options: Any) -> None:
        self.name = name
        self._thinking = thinking
        self._options = options  # as `load_model` takes them

    @property
    def section(self) -> dict[str, Any]:
        """Return the config's section `model` for this model."""
        options = {"name": self.name, "family": self.family, "thinking": self._thinking, **self._options}
        return {key: value for key, value in options.items() if value is not None}

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
        stop_ids = self.loaded.stop_ids
        return chat_format(self.tokenizer, self.family, thinking=self._thinking, stop_ids=stop_ids)


class Qwen3Model(FamilyModel):
    """Qwen3. With `thinking=False` the chat template ends the thought before the model starts to write."""

    family = "qwen3"


class LlamaModel(FamilyModel):
    """Llama 3.x."""

    family = "llama3"


class DeepSeekModel(FamilyModel):
    """DeepSeek V3 and the R1 distils."""

    family = "deepseek"
