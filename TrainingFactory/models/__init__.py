"""Models and chat formats. Names are imported on first use, so that `models.words` does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TrainingFactory.models.chat import TemplateChatFormat, chat_format
    from TrainingFactory.models.faces import DeepSeekModel, LlamaModel, Qwen3Model
    from TrainingFactory.models.families import Family, register_family
    from TrainingFactory.models.loading import LoadedModel, load_model
    from TrainingFactory.models.names import SUPPORTED_MODELS

__all__ = [
    "SUPPORTED_MODELS", "DeepSeekModel", "Family", "LlamaModel", "LoadedModel", "Qwen3Model", "TemplateChatFormat",
    "chat_format", "load_model", "register_family",
]  # fmt: skip
_NAMES_BY_MODULE = {
    "chat": ("TemplateChatFormat", "chat_format"),
    "faces": ("DeepSeekModel", "LlamaModel", "Qwen3Model"),
    "families": ("Family", "register_family"),
    "loading": ("LoadedModel", "load_model"),
    "names": ("SUPPORTED_MODELS",),
}


def __getattr__(name: str) -> Any:
    for module_name, names in _NAMES_BY_MODULE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module_name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
