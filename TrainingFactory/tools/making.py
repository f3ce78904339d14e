"""Tools by name: what a config entry such as {"name": "sql", "options": {"path": "shop.db"}} stands for."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from TrainingFactory.common import catalog
from TrainingFactory.common.options import make_from
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools.adapt import as_tool

log = logging.getLogger(__name__)


def make_tool(entry: str | Mapping[str, Any]) -> Tool | ToolSource:
    """Make a tool from a name of the catalog, or from {"name": ..., "options": {...}}."""
    row = {"name": entry} if isinstance(entry, str) else dict(entry)
    name, options = row.pop("name", None), row.pop("options", None) or {}
    if not isinstance(name, str) or not isinstance(options, Mapping) or row:
        raise ValueError(f'a tool is a name or {{"name": ..., "options": {{...}}}}, not {str(entry)[:100]}')
    target = catalog.find("tool", name)
    if _makes_tools(target):
        return as_tool(make_from(target, options, f"tool {name}"))
    if options:
        raise ValueError(f"tool {name} takes no options, but {', '.join(options)} was given")
    return as_tool(target)


def tools_without_options() -> list[Tool | ToolSource]:
    """Make every tool of the catalog that needs no options, for whoever names none, and say which."""
    made: dict[str, Tool | ToolSource] = {}
    for name in (name for name, alias in catalog.names("tool").items() if alias is None):
        with suppress(ValueError):  # it needs options
            made[name] = make_tool(name)
    log.warning("no tools are given: the catalog's that need no options are taken (%s)", ", ".join(made))
    return list(made.values())


def _makes_tools(target: Any) -> bool:
    """Tell a class of tools, or a function whose return type is a tool, from a tool itself: a plain typed function, or
    a class of qwen_agent's shape."""
    if inspect.isclass(target):
        return not hasattr(target, "call")
    hint = getattr(target, "__annotations__", {}).get("return", "") if inspect.isfunction(target) else ""
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    return "Tool" in text and "ToolResult" not in text
