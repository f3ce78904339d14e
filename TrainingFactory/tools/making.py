"""Creation of tools from config entries such as {"name": "sql", "options": {"path": "shop.db"}}."""

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
    """Create a tool from a catalog name, or from {"name": ..., "options": {...}}."""
    entry_fields = {"name": entry} if isinstance(entry, str) else dict(entry)
    name = entry_fields.pop("name", None)
    options = entry_fields.pop("options", None) or {}
    if not isinstance(name, str) or not isinstance(options, Mapping) or entry_fields:
        raise ValueError(f'invalid tool {str(entry)[:100]}; expected {{"name": ..., "options": {{...}}}}')
    definition = catalog.find("tool", name)
    if _is_factory(definition):
        return as_tool(make_from(definition, options, f"tool {name}"))
    if options:
        raise ValueError(f"tool {name} takes no options; remove {', '.join(options)}")
    return as_tool(definition)


def make_tools_without_options() -> list[Tool | ToolSource]:
    """Create every catalog tool that needs no options, and log a warning that lists them."""
    tools: dict[str, Tool | ToolSource] = {}
    for name in (name for name, alias in catalog.names("tool").items() if alias is None):
        with suppress(ValueError):  # it needs options
            tools[name] = make_tool(name)
    log.warning("no tools were passed; using all catalog tools that need no options: %s", ", ".join(tools))
    return list(tools.values())


def _is_factory(factory: Any) -> bool:
    """Return whether `factory` creates tools: it is a class of tools, or a function whose return type is a tool. False
    for objects that are tools themselves: a plain typed function, or a class with qwen_agent's interface."""
    if inspect.isclass(factory):
        return not hasattr(factory, "call")
    hint = getattr(factory, "__annotations__", {}).get("return", "") if inspect.isfunction(factory) else ""
    type_name = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    return "Tool" in type_name and "ToolResult" not in type_name
