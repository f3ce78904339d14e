"""`@tool`, which turns a typed Python function or method into a tool."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from types import MethodType
from typing import Any, TypedDict, Unpack, overload

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from TrainingFactory.common.images import as_image, is_image, join_pieces, make_rejection_text
from TrainingFactory.common.options import make_from
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import describe_errors, get_description, make_arguments_model, make_schema
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Image, ToolResult, ToolSpec


class FunctionTool:
    """A function with its tool schema. Python code can still call it like the original function."""

    def __init__(
        self, function: Callable[..., Any], spec: ToolSpec, options: ToolOptions, model: type[BaseModel]
    ) -> None:
        self.function = function
        self.spec = spec
        self.options = options
        self._model = model
        self._is_method = _takes_self(function)
        self._is_async = inspect.iscoroutinefunction(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object | None, owner: type | None = None) -> FunctionTool:
        if instance is None or not self._is_method:
            return self
        return FunctionTool(MethodType(self.function, instance), self.spec, self.options, self._model)

    def __repr__(self) -> str:
        return f"<tool {self.spec.name}>"

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        """Call the function: on the event loop if it is async, otherwise on a thread."""
        try:
            converted_arguments = self._convert_arguments(arguments)
        except ValidationError as error:
            return ToolResult(describe_errors(self.spec, error), ok=False, error="schema")
        if self._is_async:
            return as_result(await self.function(**converted_arguments))
        # The conversion runs on the thread too, because a large value takes long to serialize.
        return await in_thread(lambda: as_result(self.function(**converted_arguments)))

    def _convert_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert the arguments to the function's types; omitted arguments keep their Python defaults."""
        model = self._model.model_validate(arguments)
        passed_names = model.model_fields_set
        return {
            alias: getattr(model, name) for name, alias in _get_aliases(self._model) if name in passed_names
        }


@functools.cache
def _get_aliases(model: type[BaseModel]) -> list[tuple[str, str]]:
    return [(name, str(field.alias)) for name, field in model.model_fields.items()]


def as_result(value: Any) -> ToolResult:
    """Convert a tool's return value to a ToolResult. Images stay images; other values than strings become JSON."""
    if isinstance(value, str):
        return ToolResult(value)
    if isinstance(value, ToolResult):
        return value.with_content(_as_text(value.content))
    contents = value if isinstance(value, list | tuple) else [value]
    if not any(map(is_image, contents)):
        return ToolResult(_as_text(value))
    content, images = join_pieces(map(_to_text_or_image, contents), "\n")
    return ToolResult(content, images=images)


def _to_text_or_image(value: Any) -> str | Image:
    """Convert one returned value to a text or an image; an invalid image becomes an error text for the model."""
    if not is_image(value):
        return _as_text(value)
    try:
        return as_image(value)
    except ValueError as error:
        return make_rejection_text(error)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value, fallback=str).decode()


class ToolKeywords(TypedDict, total=False):
    """The keyword arguments of `@tool`, typed for editors. A test keeps them equal to the fields of `ToolOptions`."""

    timeout: float | None
    ordered: bool | None
    pure: bool
    stateful: bool
    idempotent: bool
    retries: int
    concurrency: int | None
    rate: float | None
    server: str
    version: str


@overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, **options: Unpack[ToolKeywords]
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    **options: Any,
) -> Any:
    """Turn a function into a tool: `@tool` or `@tool(timeout=5, pure=True)`. The keywords are the fields of
    `ToolOptions`; `ordered` defaults to true for methods and to false for functions."""
    ordered: bool | None = options.pop("ordered", None)
    base_options: ToolOptions = make_from(ToolOptions, options, "@tool")
    if "retries" in options and base_options.retries and not base_options.repeatable:
        raise ValueError("@tool: retries needs pure=True or idempotent=True; other tools are never retried")

    def wrap(function: Callable[..., Any]) -> FunctionTool:
        if isinstance(function, staticmethod):  # which hides that its function is async
            function = function.__func__
        tool_name = name or function.__name__
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool_name):
            raise ValueError(f"invalid tool name {tool_name!r}: set name= to 1 to 64 letters, digits, _ or -")
        is_method = _takes_self(function)
        model = make_arguments_model(function, tool_name, skip_first=is_method)
        tool_description = get_description(function) if description is None else description
        tool_options = dataclasses.replace(base_options, ordered=is_method if ordered is None else ordered)
        spec = ToolSpec(tool_name, tool_description, make_schema(model))
        return FunctionTool(function, spec, tool_options, model)

    return wrap if function is None else wrap(function)


def _takes_self(function: Callable[..., Any]) -> bool:
    """Return whether the first parameter is called self: inside a class body, nothing else identifies a method."""
    return next(iter(inspect.signature(function).parameters), None) == "self"
