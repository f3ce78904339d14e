"""Conversion of messages and tool specs to and from OpenAI-style dicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from TrainingFactory.common.image_parts import make_openai_content, read_parts
from TrainingFactory.types import Message, Role, ToolCall, ToolSpec


def message_to_dict(message: Message) -> dict[str, Any]:
    """Convert a message to an OpenAI-style dict without loss. Two keys are not OpenAI's: `reasoning_content`, and
    `error` on an unparsable call. The content of a message with images is a list of parts."""
    content = make_openai_content(message) if message.images else message.content
    row: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [_call_to_dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        row["name"] = message.name
    return row


def message_from_dict(row: Any) -> Message:
    if not isinstance(row, Mapping) or "role" not in row:
        raise ValueError(f'a message must be an object with "role" and "content", not {str(row)[:60]}')
    role = "system" if row["role"] == "developer" else row["role"]
    if role not in get_args(Role):
        raise ValueError(f"unknown role {role!r} of a message; use one of {', '.join(get_args(Role))}")
    calls = row.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list, not {str(calls)[:60]}")
    content, images = read_parts(row.get("content"))
    if images and role == "assistant":
        raise ValueError("an assistant message has an image; models write text only")
    return Message(
        role=role,
        content=content,
        tool_calls=[_call_from_dict(call) for call in calls],
        tool_call_id=row.get("tool_call_id"),
        name=row.get("name"),
        reasoning=row.get("reasoning_content", row.get("reasoning")),
        images=images,
    )


def spec_to_dict(spec: ToolSpec) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    return {"type": "function", "function": function}


def spec_from_dict(row: Mapping[str, Any]) -> ToolSpec:
    function = row.get("function", row)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f'a tool must be an object with a "name", not {str(row)[:60]}')
    spec = ToolSpec(function["name"], function.get("description") or "")
    spec.parameters = function.get("parameters") or spec.parameters
    return spec


def _call_to_dict(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    row: dict[str, Any] = {"id": call.id, "type": "function"}
    row["function"] = {"name": call.name, "arguments": arguments}
    if call.error is not None:
        row["error"] = call.error
    return row


def _call_from_dict(call_row: Any) -> ToolCall:
    function = call_row.get("function", call_row) if isinstance(call_row, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f'a tool call must be an object with a function "name", not {str(call_row)[:60]}')
    arguments, error = function.get("arguments") or {}, call_row.get("error")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as json_error:
            arguments, error = {}, error or f"the arguments are not valid JSON: {json_error}"
    if not isinstance(arguments, dict):
        arguments, error = {}, error or "the arguments must be a JSON object"
    return ToolCall(function["name"], arguments, call_row.get("id") or "", error)
