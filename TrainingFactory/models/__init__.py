"""Models: how each family writes and reads a conversation, loading, and the built-in tiny model.

Names are imported on first use, so that `models.words` costs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from TrainingFactory.models.chat import TemplateChatFormat, chat_format
    from TrainingFactory.models.deepseek import DeepSeekModel
    from TrainingFactory.models.families import Family, register_family
    from TrainingFactory.models.llama import LlamaModel
    from TrainingFactory.models.loading import LoadedModel, load_model
    from TrainingFactory.models.names import SUPPORTED_MODELS
    from TrainingFactory.models.qwen3 import Qwen3Model

_HOMES = {
    "TemplateChatFormat": "chat",
    "chat_format": "chat",
    "DeepSeekModel": "deepseek",
    "LlamaModel": "llama",
    "Qwen3Model": "qwen3",
    "Family": "families",
    "register_family": "families",
    "LoadedModel": "loading",
    "load_model": "loading",
    "SUPPORTED_MODELS": "names",
}
__all__ = [
    "SUPPORTED_MODELS",
    "DeepSeekModel",
    "Family",
    "LlamaModel",
    "LoadedModel",
    "Qwen3Model",
    "TemplateChatFormat",
    "chat_format",
    "load_model",
    "register_family",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
