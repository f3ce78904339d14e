"""Environments and tools from a user's Python file. Everything that can be wrong with it is told by file and line."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools import FunctionTool
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.user_code import defined, opened


def environment_from_file(name: str) -> type[ToolEnvironment]:
    """Return the environment class in `weather.py`, or the one named in `weather.py:Weather`."""
    module, path, wanted = opened("environment", name)
    found = [_named(module, path, wanted)] if wanted else defined(module)
    found = [value for value in found if inspect.isclass(value) and issubclass(value, ToolEnvironment)]
    if not found:
        what = f"{wanted} in {path} is" if wanted else f"{path} defines"
        raise ValueError(f"{what} no environment: a class that inherits from ToolEnvironment")
    if len(found) > 1:
        names = ", ".join(f"{path}:{value.__name__}" for value in found)
        raise ValueError(f"{path} defines several environments; say which: {names}")
    return found[0]


def tools_from_file(name: str) -> list[Tool | ToolSource]:
    """Return all `@tool` functions of `mytools.py`, or the one named in `mytools.py:lookup`, which may also be a plain
    typed function."""
    module, path, wanted = opened("tool", name)
    if wanted:
        return [as_tool(_named(module, path, wanted))]
    found = [value for value in defined(module) if isinstance(value, FunctionTool)]
    if not found:
        raise ValueError(f"{path} defines no tool: put @tool (from TrainingFactory.tools) over a function")
    return list(found)


def _named(module: ModuleType, path: Path, wanted: str) -> Any:
    if wanted not in vars(module):
        raise ValueError(f"{path} has no {wanted!r}")
    return vars(module)[wanted]
