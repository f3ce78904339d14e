"""Fingerprints of tools and tool calls: equal in every process, and different if anything about them differs."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from TrainingFactory.protocols import Tool
from TrainingFactory.tools.options import ToolOptions

T = TypeVar("T")
MAX_CACHED_ENTRIES = 1000
_FORMAT_VERSION = "1"  # of the fingerprints; changing it invalidates all cached results


class IdentityCache(Generic[T]):
    """Memoizes `compute` by object identity, so that the objects need not be hashable."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._cache: dict[int, tuple[Any, T]] = {}

    def __call__(self, obj: Any) -> T:
        entry = self._cache.get(id(obj))
        if entry is None or entry[0] is not obj:  # Python may reuse an id
            if len(self._cache) >= MAX_CACHED_ENTRIES:
                self._cache.clear()
            entry = self._cache[id(obj)] = (obj, self._compute(obj))
        return entry[1]


def fingerprint_call(tool: Tool, options: ToolOptions, arguments: dict[str, Any]) -> str | None:
    """Return a fingerprint of a call, from the server, tool, version, schema, code and arguments, but not the caller.
    None if the arguments are not JSON, which only Python code can pass."""
    try:
        arguments_json = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return None
    implementation: Any = inspect.unwrap(tool)  # type: ignore[arg-type]  # a function, or an object with `run`
    code = _get_source(_get_code(implementation) or _get_code(getattr(implementation, "run", None)))
    schema = _encode_schema(tool.spec.parameters)
    return digest(options.server, tool.spec.name, options.version, schema, code, arguments_json)


def fingerprint_object(obj: Any) -> str:
    """Return a fingerprint of an object, from the source of its methods, its JSON attributes, and the types of its
    other attributes."""
    cls = type(obj)
    attributes: dict[str, Any] = {}
    for base_class in reversed(cls.__mro__):
        attributes |= {name: value for name, value in vars(base_class).items() if name != "__dict__"}
    methods = {name: _get_source(_get_code(value)) for name, value in attributes.items() if _get_code(value)}
    attributes |= getattr(obj, "__dict__", {})
    plain_attributes = {
        name: value for name, value in attributes.items() if not name.startswith("__")
    } | methods
    try:
        as_json = json.dumps(plain_attributes, sort_keys=True, default=lambda value: type(value).__qualname__)
    except (TypeError, ValueError, RecursionError):
        as_json = ""
    return digest(cls.__module__, cls.__qualname__, as_json)


def digest(*texts: str) -> str:
    """Return a hash of several texts, which also depends on the boundaries between them."""
    return hashlib.blake2b(json.dumps([_FORMAT_VERSION, *texts]).encode(), digest_size=20).hexdigest()


def _get_code(function: Any) -> Any:
    return getattr(function, "__code__", None)


@IdentityCache
def _get_source(code: Any) -> str:
    """Return a function's source by its code object, because for a class Python would parse the whole file."""
    try:
        return "" if code is None else inspect.getsource(code)
    except (OSError, TypeError):
        return ""


@IdentityCache
def _encode_schema(schema: dict[str, Any]) -> str:
    return json.dumps(schema, sort_keys=True, default=str)
