"""`@tool`: a typed Python function or method as a tool."""

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

from TrainingFactory.common.options import make_from
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import arguments_model, description_of, model_problems, parameters_schema
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec


class FunctionTool:
    """A function with its schema. Still callable from Python as the function it was made from."""

    def __init__(
        self, function: Callable[..., Any], spec: ToolSpec, options: ToolOptions, model: type[BaseModel]
    ) -> None:
        self.function = function
        self.spec = spec
        self.options = options
        self._model = model
        self._is_method, self._is_async = _takes_self(function), inspect.iscoroutinefunction(function)
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
        """Call the function: an async one on the event loop, others on a thread."""
        try:
            values = self._values(arguments)
        except ValidationError as error:
            return ToolResult(model_problems(self.spec, error), ok=False, error="schema")
        if self._is_async:
            return as_result(await self.function(**values))
        # The conversion runs on the thread too: a large value may take its time.
        return await in_thread(lambda: as_result(self.function(**values)))

    def _values(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Read the arguments in the function's own types; what was left out keeps its Python default."""
        read = self._model.model_validate(arguments)
        given = read.model_fields_set
        return {alias: getattr(read, name) for name, alias in _aliases(self._model) if name in given}


@functools.cache
def _aliases(model: type[BaseModel]) -> list[tuple[str, str]]:
    return [(name, str(field.alias)) for name, field in model.model_fields.items()]


def as_result(value: Any) -> ToolResult:
    """Make a result of what a tool returned: texts as they are, other values as JSON."""
    if isinstance(value, ToolResult):
        rest = value.ok, value.error, value.cached, value.seconds, value.attachments, value.id
        return ToolResult(_text(value.content), *rest)
    return ToolResult(_text(value))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value, fallback=str).decode()


class OptionNames(TypedDict, total=False):
    """Types the keywords of `@tool` for editors, as the fields of `ToolOptions`; a test keeps the two alike."""

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
    *, name: str | None = None, description: str | None = None, **options: Unpack[OptionNames]
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    **options: Any,
) -> Any:
    """Make a tool of a function: `@tool` or `@tool(timeout=5, pure=True)`. The keywords are those of `ToolOptions`;
    methods are `ordered` unless they say otherwise."""
    ordered: bool | None = options.pop("ordered", None)
    chosen: ToolOptions = make_from(ToolOptions, options, "@tool")
    if "retries" in options and chosen.retries and not chosen.repeatable:
        raise ValueError("a tool with retries must be marked pure or idempotent: others are never repeated")

    def make(function: Callable[..., Any]) -> FunctionTool:
        if isinstance(function, staticmethod):  # which hides that its function is async
            function = function.__func__
        called = name or function.__name__
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", called):
            raise ValueError(
                f"a tool's name has 1 to 64 letters, digits, _ or -, unlike {called!r}; set name="
            )
        is_method = _takes_self(function)
        model = arguments_model(function, called, skip_first=is_method)
        text = description_of(function) if description is None else description
        full = dataclasses.replace(chosen, ordered=is_method if ordered is None else ordered)
        return FunctionTool(function, ToolSpec(called, text, parameters_schema(model)), full, model)

    return make if function is None else make(function)


def _takes_self(function: Callable[..., Any]) -> bool:
    """Tell methods by a first parameter called self: inside a class body nothing else shows it."""
    return next(iter(inspect.signature(function).parameters), None) == "self"
