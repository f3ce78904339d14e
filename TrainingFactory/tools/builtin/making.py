"""Tools by name: what a config entry such as {"name": "sql", "options": {"path": "shop.db"}} stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from TrainingFactory import catalog
from TrainingFactory.options import OptionError, Wrong, make_from
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools.adapt import as_tool

__all__ = ["OptionError", "Wrong", "call_with", "make_tool"]
call_with = make_from


def make_tool(entry: str | Mapping[str, Any]) -> Tool | ToolSource:
    """From a name of the catalog, or from {"name": ..., "options": {...}}."""
    row = {"name": entry} if isinstance(entry, str) else dict(entry)
    name, options = row.pop("name", None), row.pop("options", None) or {}
    if not isinstance(name, str) or not isinstance(options, Mapping) or row:
        raise ValueError(f'a tool is a name or {{"name": ..., "options": {{...}}}}, not {str(entry)[:100]}')
    target = catalog.find("tool", name)
    if _is_maker(target):
        return as_tool(make_from(target, options, f"tool {name}"))
    if options:
        raise ValueError(f"tool {name} takes no options, but {', '.join(options)} was given")
    return as_tool(target)


def _is_maker(target: Any) -> bool:
    """A class of tools, or a function that makes one; not a tool itself, nor a class of qwen_agent's shape."""
    if inspect.isclass(target):
        return not hasattr(target, "call")
    return inspect.isfunction(target) and "return" in target.__annotations__ and _promises_tool(target)


def _promises_tool(function: Callable[..., Any]) -> bool:
    """A plain typed function is a tool; one whose return type is a tool makes one."""
    hint = function.__annotations__["return"]
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    return "Tool" in text and "ToolResult" not in text
