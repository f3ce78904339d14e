"""Tools that a model can call, and the executor that runs the calls."""

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
_LAZY_IMPORTS = {  # most tools need neither a cache nor an MCP server
    "MCPTools": "TrainingFactory.tools.mcp.source",
    "ToolCache": "TrainingFactory.tools.cache.cache",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_IMPORTS[name]), name)
