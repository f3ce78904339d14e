"""Tools: what a model may call, and the one executor that calls it."""

from TrainingFactory.tools.decorator import FunctionTool, tool
from TrainingFactory.tools.executor import AsyncToolExecutor
from TrainingFactory.tools.options import ToolOptions

__all__ = ["AsyncToolExecutor", "FunctionTool", "ToolOptions", "tool"]
