"""Tools: what a model may call, and the one executor that calls it."""

from TrainingFactory.tools.decorator import FunctionTool, ToolOptions, tool
from TrainingFactory.tools.executor import AsyncToolExecutor

__all__ = ["AsyncToolExecutor", "FunctionTool", "ToolOptions", "tool"]
