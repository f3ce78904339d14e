"""Models by family name: a model with its chat layer, for people who write `Qwen3Model("qwen3-4b")`."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

from TrainingFactory.models.chat import TemplateChatFormat, chat_format
from TrainingFactory.models.loading import LoadedModel, load_model


class ModelFace:
    """Loaded on first use, so that naming a model costs nothing."""

    family: ClassVar[str | None] = None

    def __init__(self, name: str, *, thinking: bool | None = None, **options: Any) -> None:
        self.name = name
        self._thinking = thinking
        self._options = options  # as `load_model` takes them

    @property
    def section(self) -> dict[str, Any]:
        """As a config names the model."""
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
        return chat_format(
            self.tokenizer, self.family, thinking=self._thinking, stop_ids=self.loaded.stop_ids
        )
