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
    """The environment class in `weather.py`, or the one named in `weather.py:Weather`."""
    module, path, wanted = opened("environment", name)
    if wanted:
        return _named(module, path, wanted)
    found = [value for value in defined(module) if _is_environment(value)]
    if not found:
        raise ValueError(f"{path} defines no environment: a class that inherits from ToolEnvironment")
    if len(found) > 1:
        names = ", ".join(f"{path}:{value.__name__}" for value in found)
        raise ValueError(f"{path} defines several environments; say which: {names}")
    return found[0]


def tools_from_file(name: str) -> list[Tool | ToolSource]:
    """All `@tool` functions of `mytools.py`, or the one named in `mytools.py:lookup`, which may also be a plain
    typed function."""
    module, path, wanted = opened("tool", name)
    if wanted:
        value: Any = vars(module).get(wanted)
        if value is None:
            raise ValueError(f"{path} has no {wanted!r}")
        return [as_tool(value)]
    found = [value for value in defined(module) if isinstance(value, FunctionTool)]
    if not found:
        raise ValueError(f"{path} defines no tool: put @tool (from TrainingFactory.tools) over a function")
    return list(found)


def _named(module: ModuleType, path: Path, wanted: str) -> type[ToolEnvironment]:
    value: Any = vars(module).get(wanted)
    if value is None:
        raise ValueError(f"{path} has no {wanted!r}")
    if not _is_environment(value):
        raise ValueError(f"{wanted} in {path} is no environment: a class that inherits from ToolEnvironment")
    return value


def _is_environment(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, ToolEnvironment)
