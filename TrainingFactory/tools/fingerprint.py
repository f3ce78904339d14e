"""Names for calls and tools that say what they are: equal in every process, other when anything differs."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from TrainingFactory.protocols import Tool
from TrainingFactory.tools.options import ToolOptions

T = TypeVar("T")
MAX_KNOWN = 1000
_FORMAT = "1"  # of the names; a new one makes all that is cached old


class ByIdentity(Generic[T]):
    """Computes `make(thing)` once per object, which need not be hashable."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self._known: dict[int, tuple[Any, T]] = {}

    def __call__(self, thing: Any) -> T:
        known = self._known.get(id(thing))
        if known is None or known[0] is not thing:  # an id may be used again
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[id(thing)] = (thing, self._make(thing))
        return known[1]


def call_name(tool: Tool, options: ToolOptions, arguments: dict[str, Any]) -> str | None:
    """Name a call, whoever makes it, by server, tool, version, schema, code and arguments; None where these are no
    JSON, which only Python code can make."""
    try:
        text = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return None
    answering: Any = inspect.unwrap(tool)  # type: ignore[arg-type]  # a function, or an object with `run`
    code = _source(_code_of(answering) or _code_of(getattr(answering, "run", None)))
    schema = _schema_text(tool.spec.parameters)
    return digest(options.server, tool.spec.name, options.version, schema, code, text)


def definition(thing: Any) -> str:
    """Name an object by the text of its methods and by its plain attributes; of other attributes the type counts."""
    cls, attributes = type(thing), dict[str, Any]()
    for base in reversed(cls.__mro__):
        attributes |= {name: value for name, value in vars(base).items() if name != "__dict__"}
    methods = {name: _source(_code_of(value)) for name, value in attributes.items() if _code_of(value)}
    attributes |= getattr(thing, "__dict__", {})
    plain = {name: value for name, value in attributes.items() if not name.startswith("__")} | methods
    try:
        text = json.dumps(plain, sort_keys=True, default=lambda value: type(value).__qualname__)
    except (TypeError, ValueError, RecursionError):
        text = ""
    return digest(cls.__module__, cls.__qualname__, text)


def digest(*parts: str) -> str:
    """Return one name for several texts; no two lists of texts share one."""
    return hashlib.blake2b(json.dumps([_FORMAT, *parts]).encode(), digest_size=20).hexdigest()


def _code_of(function: Any) -> Any:
    return getattr(function, "__code__", None)


@ByIdentity
def _source(code: Any) -> str:
    """Return the text of a function, by its code: Python would parse the whole file for a class."""
    try:
        return "" if code is None else inspect.getsource(code)
    except (OSError, TypeError):
        return ""


@ByIdentity
def _schema_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True, default=str)
