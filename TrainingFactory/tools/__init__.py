"""Tools: what a model may call, and the one executor that calls it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.decorator import FunctionTool, tool
from TrainingFactory.tools.executor import AsyncToolExecutor
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.runtime import ToolRuntime

if TYPE_CHECKING:
    from TrainingFactory.tools.cache.cache import ToolCache
    from TrainingFactory.tools.mcp.source import MCPTools

__all__ = [
    "AsyncToolExecutor",
    "FunctionTool",
    "MCPTools",
    "ToolCache",
    "ToolOptions",
    "ToolRuntime",
    "as_tool",
    "tool",
]
_WHEN_USED = {  # most tools need neither a cache nor a server
    "MCPTools": "TrainingFactory.tools.mcp.source",
    "ToolCache": "TrainingFactory.tools.cache.cache",
}


def __getattr__(name: str) -> Any:
    if name not in _WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHEN_USED[name]), name)
