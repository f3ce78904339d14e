"""Conversion of objects to tools: our own tools, typed functions, and classes with qwen_agent's interface."""

from __future__ import annotations

import inspect
import json
from typing import Any

from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools.decorator import FunctionTool, as_result, tool
from TrainingFactory.tools.fingerprint import digest, fingerprint_object
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import check_schema
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec


def as_tool(obj: Any) -> Tool | ToolSource:
    """Return a tool or tool source unchanged; wrap a typed function or an object with qwen_agent's `BaseTool`
    interface. Raise ValueError for other objects."""
    if isinstance(obj, FunctionTool):  # checked first: the most frequent case, and the checks below are slow
        return obj
    if inspect.isclass(obj):
        if not _is_base_tool(obj):
            raise _make_not_a_tool_error(obj)
        return BaseToolAdapter(obj())
    if isinstance(obj, ToolSource):
        return obj
    if isinstance(obj, Tool):
        check_schema(obj.spec)
        return obj
    if _is_base_tool(obj):
        return BaseToolAdapter(obj)
    if inspect.isroutine(obj):
        return tool(obj)
    raise _make_not_a_tool_error(obj)


class BaseToolAdapter:
    """Adapter from qwen_agent's `BaseTool`, whose `call` gets the arguments as a JSON string, to a tool of ours."""

    def __init__(self, base_tool: Any) -> None:
        self.base_tool = base_tool
        schema = _as_schema(getattr(base_tool, "parameters", None))
        self.spec = ToolSpec(base_tool.name, base_tool.description or "", schema)
        check_schema(self.spec, type(base_tool).__name__)
        # The version keeps cached results apart from those of another class or other settings with the same name.
        self.options = ToolOptions(version=digest(fingerprint_object(base_tool)))

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        arguments_json = json.dumps(arguments, ensure_ascii=False)
        if inspect.iscoroutinefunction(self.base_tool.call):
            return as_result(_join_text(await self.base_tool.call(arguments_json)))
        return await in_thread(lambda: as_result(_join_text(self.base_tool.call(arguments_json))))


def _is_base_tool(obj: Any) -> bool:
    return callable(getattr(obj, "call", None)) and hasattr(obj, "name") and hasattr(obj, "description")


def _as_schema(parameters: Any) -> dict[str, Any]:
    """Return a JSON schema; convert qwen_agent's older list of {"name", "type", "description", "required"}."""
    if parameters is None:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, list):
        return parameters
    properties = {
        parameter["name"]: {key: value for key, value in parameter.items() if key not in ("name", "required")}
        for parameter in parameters
    }
    required = [parameter["name"] for parameter in parameters if parameter.get("required")]
    return {"type": "object", "properties": properties} | ({"required": required} if required else {})


def _join_text(value: Any) -> Any:
    """Join a list of content items (objects or dicts with `text`) into one text; return other values unchanged."""
    if not isinstance(value, list) or not value:
        return value
    part_texts = [
        part.get("text") if isinstance(part, dict) else getattr(part, "text", None) for part in value
    ]
    texts = [text for text in part_texts if isinstance(text, str)]
    return "\n".join(texts) if len(texts) == len(value) else value


def _make_not_a_tool_error(obj: Any) -> ValueError:
    return ValueError(
        f"{str(obj)[:80]!r} is not a tool; pass a function with type hints, an object with `spec` and `run`, a source "
        "with `open`, `session` and `close`, or a class with `name`, `description`, `parameters` and `call`"
    )
