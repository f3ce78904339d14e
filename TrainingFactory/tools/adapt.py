"""Makes a tool of whatever can serve as one: our own tools, typed functions, and classes of qwen_agent's shape."""

from __future__ import annotations

import inspect
import json
from typing import Any

from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools.decorator import FunctionTool, as_result, tool
from TrainingFactory.tools.fingerprint import definition, digest
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import check_schema
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec


def as_tool(thing: Any) -> Tool | ToolSource:
    """Return a tool or source as it is, a typed function or `BaseTool` made a tool; else raise ValueError."""
    if isinstance(thing, FunctionTool):  # by far the most frequent, and the checks below take their time
        return thing
    if inspect.isclass(thing):
        return BaseToolAdapter(thing()) if _is_base_tool(thing) else _refuse(thing)
    if isinstance(thing, ToolSource):
        return thing
    if isinstance(thing, Tool):
        check_schema(thing.spec)
        return thing
    if _is_base_tool(thing):
        return BaseToolAdapter(thing)
    return tool(thing) if inspect.isroutine(thing) else _refuse(thing)


class BaseToolAdapter:
    """Adapts an object with `name`, `description`, `parameters` (a JSON schema, or a list of parameters) and
    `call(params, **kwargs)`, which gets the arguments as JSON text, as in qwen_agent."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing
        schema = _parameters(getattr(thing, "parameters", None))
        self.spec = ToolSpec(thing.name, thing.description or "", schema)
        check_schema(self.spec, type(thing).__name__)
        # What is cached must not be served for another class or other settings of the same name.
        self.options = ToolOptions(version=digest(definition(thing)))

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        text = json.dumps(arguments, ensure_ascii=False)
        if inspect.iscoroutinefunction(self.thing.call):
            return as_result(_content(await self.thing.call(text)))
        return await in_thread(lambda: as_result(_content(self.thing.call(text))))


def _is_base_tool(thing: Any) -> bool:
    return callable(getattr(thing, "call", None)) and hasattr(thing, "name") and hasattr(thing, "description")


def _parameters(given: Any) -> dict[str, Any]:
    """Read a schema; qwen_agent's older form is a list of {"name", "type", "description", "required"}."""
    if given is None:
        return {"type": "object", "properties": {}}
    if not isinstance(given, list):
        return given
    properties = {
        entry["name"]: {key: value for key, value in entry.items() if key not in ("name", "required")}
        for entry in given
    }
    required = [entry["name"] for entry in given if entry.get("required")]
    return {"type": "object", "properties": properties} | ({"required": required} if required else {})


def _content(value: Any) -> Any:
    """Turn content items (objects or dicts with `text`) into their text; leave what else there may be."""
    if not isinstance(value, list) or not value:
        return value
    found = [item.get("text") if isinstance(item, dict) else getattr(item, "text", None) for item in value]
    texts = [text for text in found if isinstance(text, str)]
    return "\n".join(texts) if len(texts) == len(value) else value


def _refuse(thing: Any) -> Any:
    raise ValueError(
        f"{str(thing)[:80]!r} is no tool: a tool is a function with type hints, an object with `spec` and `run`, "
        "a source with `open`, `session` and `close`, or a class with `name`, `description`, `parameters` and `call`"
    )
