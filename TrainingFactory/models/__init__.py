"""Models and chat formats. Names are imported on first use, so that `models.words` does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TrainingFactory.models.chat import TemplateChatFormat as TemplateChatFormat
    from TrainingFactory.models.chat import chat_format as chat_format
    from TrainingFactory.models.faces import DeepSeekModel as DeepSeekModel
    from TrainingFactory.models.faces import LlamaModel as LlamaModel
    from TrainingFactory.models.faces import Qwen3Model as Qwen3Model
    from TrainingFactory.models.families import Family as Family
    from TrainingFactory.models.families import register_family as register_family
    from TrainingFactory.models.loading import LoadedModel as LoadedModel
    from TrainingFactory.models.loading import load_model as load_model
    from TrainingFactory.models.names import SUPPORTED_MODELS as SUPPORTED_MODELS

_MODULES = {
    "chat": ("TemplateChatFormat", "chat_format"),
    "faces": ("DeepSeekModel", "LlamaModel", "Qwen3Model"),
    "families": ("Family", "register_family"),
    "loading": ("LoadedModel", "load_model"),
    "names": ("SUPPORTED_MODELS",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
