"""Parsing of conversations in datasets: OpenAI-style messages, ShareGPT, or plain strings. Functions raise ValueError
with a text that names the column; the caller puts the location of the row before it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from TrainingFactory.common.image_parts import is_image_part
from TrainingFactory.common.openai_format import message_from_dict, spec_from_dict
from TrainingFactory.data.trajectories import CompactTrajectory
from TrainingFactory.types import Message, Reward, ToolSpec

# Returns why arguments do not match a tool's schema, or None. Passed in, because this layer does not know schemas.
CallChecker = Callable[[ToolSpec, dict[str, Any]], str | None]

SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response"), "tool"),
}


@dataclass(slots=True)
class Conversation:
    id: str
    messages: list[Message]
    tools: list[ToolSpec] = field(default_factory=list)
    recorded: CompactTrajectory | None = None  # the recorded trajectory, with its tokens
    context: int = 0  # number of leading messages that are not trained, whatever their role
    reward: Reward | None = None
    steps: list[str] = field(default_factory=list)  # labelled steps of the last message
    bad: frozenset[int] = frozenset()  # indices of negative examples, which may contain invalid calls

    @property
    def start(self) -> int:
        """Return the index of the first trained message."""
        roles = (message.role for message in self.messages)
        return next(i for i, role in enumerate(roles) if role == "assistant" and i >= self.context)


def read_conversation(columns: Mapping[str, Any], column: str, is_negative: bool = False) -> list[Message]:
    """Return the conversation in a column. `is_negative`: keep invalid calls as text instead of raising ValueError."""
    rows = read_list(columns[column], column)
    if not rows:
        raise ValueError(f'has an empty "{column}"')
    if all(isinstance(row, Mapping) and "from" in row for row in rows):
        rows = _convert_sharegpt(rows, column, is_negative)
    return name_tool_messages(with_system(columns, read_messages(rows, column, is_negative)))


def read_text_or_messages(
    columns: Mapping[str, Any], column: str, role: str, is_negative: bool = False
) -> list[Message]:
    """Return the messages in a column that holds messages, or strings of `role`. `is_negative`: keep invalid calls as
    text instead of raising ValueError."""
    cell = columns[column]
    if isinstance(cell, str) and cell.lstrip().startswith("[{") and '"role"' in cell:
        cell = read_list(cell, column)
    if isinstance(cell, str):
        cell = [{"role": role, "content": cell}] if cell.strip() else []
    if isinstance(cell, Mapping):
        cell = [cell]
    if not isinstance(cell, list) or not cell:
        raise ValueError(f'has an invalid "{column}": it must be a non-empty string or list of messages')
    return read_messages(cell, column, is_negative)


def read_prompt(columns: Mapping[str, Any]) -> list[Message]:
    return with_system(columns, read_text_or_messages(columns, "prompt", "user"))


def read_messages(rows: Sequence[Any], column: str, is_negative: bool = False) -> list[Message]:
    messages = []
    if any(isinstance(row, Mapping) and row.get("role") in ("tool_call", "tool_response") for row in rows):
        rows = _convert_sharegpt(
            [{"from": row["role"], "value": row.get("content")} for row in rows], column, is_negative
        )
    for index, row in enumerate(rows):
        try:
            message = message_from_dict(row)
        except ValueError as error:
            raise ValueError(f'has an invalid message {index} in "{column}": {error}') from error
        invalid_call = next((call for call in message.tool_calls if call.error or not call.name), None)
        if invalid_call and is_negative:
            call_texts = [_format_call(call.get("function", call)) for call in row["tool_calls"]]
            message.content, message.tool_calls = "\n".join(filter(None, [message.content, *call_texts])), []
        elif invalid_call:
            problem = (
                f"an invalid call of {invalid_call.name!r}" if invalid_call.name else "a call without a name"
            )
            reason = invalid_call.error or "add the name of the tool"
            raise ValueError(f'has {problem} in message {index} of "{column}": {reason}')
        messages.append(message)
    return messages


def read_tools(columns: Mapping[str, Any]) -> list[ToolSpec]:
    specs = []
    for index, row in enumerate(read_list(columns.get("tools") or [], "tools")):
        try:
            spec = spec_from_dict(json.loads(row) if isinstance(row, str) else row)
            if isinstance(spec.parameters, str):  # some datasets store them as a JSON string
                spec.parameters = json.loads(spec.parameters)
            if not isinstance(spec.parameters, dict):
                raise ValueError(f"its parameters are {str(spec.parameters)[:40]}, not a JSON schema")
        except (ValueError, AttributeError) as error:
            raise ValueError(f'has an invalid tool {index} in "tools": {error}') from error
        specs.append(spec)
    return specs


def read_list(cell: Any, column: str) -> list[Any]:
    """Return the list in a column, which holds a list or a JSON string of one."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'has a string that is not valid JSON in "{column}": {error}') from error
    if not isinstance(cell, list | tuple):
        raise ValueError(f'has {str(cell)[:40]} in "{column}"; it must be a list')
    return list(cell)


def check_roles(messages: Sequence[Message], label: str = "messages") -> list[Message]:
    """Check the roles; return the messages up to the last assistant message, because later ones are never trained."""
    assistant_indices = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not assistant_indices:
        raise ValueError(f'has no assistant message in "{label}", so there is nothing to train on')
    if assistant_indices[0] == 0:
        raise ValueError(f'has "{label}" that begins with the assistant; begin with a system or user message')
    if repeat_index := next(
        (following for previous, following in pairwise(assistant_indices) if following == previous + 1), None
    ):
        raise ValueError(
            f'has two consecutive assistant messages, {repeat_index - 1} and {repeat_index}, in "{label}"'
        )
    for index in assistant_indices:
        if not (messages[index].content or messages[index].tool_calls or messages[index].reasoning):
            raise ValueError(f'has an empty assistant message {index} in "{label}"')
    return list(messages[: assistant_indices[-1] + 1])


def check_calls(conversation: Conversation, column: str, check_call: CallChecker | None) -> None:
    """Raise ValueError if a call in a positive example is invalid or does not match the row's tools."""
    specs = {spec.name: spec for spec in conversation.tools}
    for index, message in enumerate(conversation.messages):
        location = f'in message {index} of "{column}"'
        if index < conversation.start or index in conversation.bad or message.role != "assistant":
            continue
        if problem := _find_broken_call(message.content):
            raise ValueError(f"has an invalid call {location}: {problem}")
        for call in message.tool_calls if specs else []:
            if call.name not in specs:
                raise ValueError(
                    f'calls {call.name!r} {location}, which is not in "tools": {", ".join(specs)}'
                )
            if check_call is not None and (problem := check_call(specs[call.name], call.arguments)):
                raise ValueError(f"has a call {location} with invalid arguments: {problem}")


def name_tool_messages(messages: list[Message]) -> list[Message]:
    """Set the tool name of tool messages by call id or order, because some chat templates print it."""
    name_by_id: dict[str, str] = {}
    pending_names: list[str] = []
    for message in messages:
        if message.role == "assistant":
            name_by_id |= {call.id: call.name for call in message.tool_calls if call.id}
            pending_names = [call.name for call in message.tool_calls]
        elif message.role == "tool":
            next_name = pending_names.pop(0) if pending_names else None
            message.name = message.name or name_by_id.get(message.tool_call_id or "", next_name)
    return messages


def with_system(columns: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Prepend the column "system", unless the messages begin with a system message."""
    system_prompt = columns.get("system")
    if not isinstance(system_prompt, str) or not system_prompt.strip() or messages[0].role == "system":
        return messages
    return [Message("system", system_prompt), *messages]


def _find_broken_call(text: str) -> str | None:
    """Return the problem of a malformed <tool_call> block in a text, or None."""
    for body, end_tag in re.findall(r"<tool_call>\s*(\{.*?)(</tool_call>|\Z)", text, re.DOTALL):
        if not end_tag:
            return "its text has <tool_call> without </tool_call>"
        try:
            json.loads(body, strict=False)
        except (ValueError, RecursionError) as error:
            return f"its text is not valid JSON: {error}"
    return None


def _format_call(function: Mapping[str, Any]) -> str:
    """Format a call as text, as a model would write it, even if its arguments are invalid."""
    arguments = function.get("arguments")
    json_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {json_text}}}\n</tool_call>'


def _has_image(content: Any) -> bool:
    return isinstance(content, list) and any(map(is_image_part, content))


def _convert_sharegpt(
    rows: Sequence[Mapping[str, Any]], column: str, is_negative: bool
) -> list[dict[str, Any]]:
    """Convert ShareGPT rows to OpenAI-style dicts. `is_negative`: keep invalid calls as text."""
    messages: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        sender, content = str(row["from"]), row.get("value", "")
        if sender not in SHAREGPT_ROLES:
            known_roles = ", ".join(SHAREGPT_ROLES)
            raise ValueError(
                f'has the unknown role {sender!r} in message {index} of "{column}"; known: {known_roles}'
            )
        message = {"role": SHAREGPT_ROLES[sender], "content": content}
        if sender == "tool_response" and not isinstance(content, str) and not _has_image(content):
            message["content"] = json.dumps(content, ensure_ascii=False)
        if sender in ("function_call", "tool_call"):
            previous = messages.pop() if messages and messages[-1]["role"] == "assistant" else {}  # same turn
            try:
                calls = json.loads(content) if isinstance(content, str) else content
                calls = previous.get("tool_calls", []) + (calls if isinstance(calls, list) else [calls])
                message = {"role": "assistant", "content": previous.get("content"), "tool_calls": calls}
                message_from_dict(message)
            except (ValueError, RecursionError) as error:
                if not is_negative:
                    problem = f'has an invalid call in message {index} of "{column}": not valid JSON: {error}'
                    raise ValueError(problem) from error
                text_parts = [previous.get("content"), f"<tool_call>\n{content}\n</tool_call>"]
                message = {**previous, "role": "assistant", "content": "\n".join(filter(None, text_parts))}
        messages.append(message)
    return messages
