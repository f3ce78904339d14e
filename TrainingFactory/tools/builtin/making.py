"""Tools by name: what a config entry such as {"name": "sql", "options": {"path": "shop.db"}} stands for."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from TrainingFactory import catalog
from TrainingFactory.options import make_from
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools.adapt import as_tool


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


def _makes_tools(target: Any) -> bool:
    """Tell a class of tools, or a function whose return type is a tool, from a tool itself: a plain typed function, or
    a class of qwen_agent's shape."""
    if inspect.isclass(target):
        return not hasattr(target, "call")
    hint = getattr(target, "__annotations__", {}).get("return", "") if inspect.isfunction(target) else ""
    text = hint if isinstance(hint, str) else getattr(hint, "__name__", str(hint))
    return "Tool" in text and "ToolResult" not in text


# Until all rewards take their options from TrainingFactory/options.py:
@dataclass(slots=True, frozen=True)
class Wrong:
    """One option and what is wrong with it, as it goes on after its name; `value` is what was given."""

    option: str
    text: str
    value: Any = ...


class OptionError(ValueError):
    """What a user wrote as options, with every option that is wrong by its name."""

    def __init__(self, text: str, *wrong: Wrong) -> None:
        super().__init__(text)
        self.wrong = wrong

    def within(self, option: str) -> OptionError:
        """The same, of options that are the value of another one."""
        inner = [replace(each, option=f"{option}.{each.option}") for each in self.wrong]
        return OptionError(f"{option}: {self}", *inner)


def call_with(function: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """The function called with options that a user wrote; ValueError for one that is unknown or missing."""
    parameters = inspect.signature(function).parameters
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
        known = f"it has {', '.join(parameters)}" if parameters else "it has none"
        hints: dict[str, str] = {}
        for option in options:
            if option not in parameters:
                near = difflib.get_close_matches(str(option), parameters, n=1)
                hints[str(option)] = f"; did you mean {near[0]}?" if near else ""
        if hints:
            listed = ", ".join(f"{option!r}{hint}" for option, hint in hints.items())
            raise OptionError(
                f"{what} has no option {listed} ({known})",
                *(
                    Wrong(option, f"{what} has no such option{hint} ({known})")
                    for option, hint in hints.items()
                ),
            )
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    missing = [name for name in needed if name not in options]
    if missing:
        raise OptionError(
            f"{what} needs the option{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            *(Wrong(name, f"is missing; {what} needs it") for name in missing),
        )
    return function(**options)
