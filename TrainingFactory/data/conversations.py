"""Read conversations as datasets write them: OpenAI-style messages, ShareGPT, or texts. A ValueError goes on after the
name of the row, and names the column."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from TrainingFactory.common.openai_format import message_from_dict, spec_from_dict
from TrainingFactory.data.trajectories import Kept
from TrainingFactory.types import Message, Reward, ToolSpec

# What is wrong with the arguments of a call, or None; handed in by who knows schemas.
Fits = Callable[[ToolSpec, dict[str, Any]], str | None]

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
    recorded: Kept | None = None  # the trajectory it was, where its tokens are known
    context: int = 0  # so many messages are not learned, whoever wrote them
    reward: Reward | None = None
    steps: list[str] = field(default_factory=list)  # of the last message, where each has a label
    bad: frozenset[int] = frozenset()  # messages that show how it is not done

    @property
    def start(self) -> int:
        """Return the number of the first message that is learned."""
        roles = (message.role for message in self.messages)
        return next(n for n, role in enumerate(roles) if role == "assistant" and n >= self.context)


def conversation_in(columns: Mapping[str, Any], name: str, bad: bool = False) -> list[Message]:
    """Return the conversation in a column; `bad`: calls that cannot be read are kept, as texts."""
    rows = as_list(columns[name], name)
    if not rows:
        raise ValueError(f'has an empty "{name}"')
    if all(isinstance(row, Mapping) and "from" in row for row in rows):
        rows = _from_sharegpt(rows, name, bad)
    return named_replies(with_system(columns, messages_in(rows, name, bad)))


def text_or_messages(columns: Mapping[str, Any], name: str, role: str, bad: bool = False) -> list[Message]:
    """Return a column that is a text of that role, or messages; `bad` as in `conversation_in`."""
    value = columns[name]
    if isinstance(value, str) and value.lstrip().startswith("[{") and '"role"' in value:
        value = as_list(value, name)
    if isinstance(value, str):
        value = [{"role": role, "content": value}] if value.strip() else []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f'has a "{name}" that must be a text or a list of messages, and not empty')
    return messages_in(value, name, bad)


def prompt_in(columns: Mapping[str, Any]) -> list[Message]:
    return with_system(columns, text_or_messages(columns, "prompt", "user"))


def messages_in(rows: Sequence[Any], name: str, bad: bool = False) -> list[Message]:
    found = []
    if any(isinstance(row, Mapping) and row.get("role") in ("tool_call", "tool_response") for row in rows):
        rows = _from_sharegpt([{"from": row["role"], "value": row.get("content")} for row in rows], name, bad)
    for number, row in enumerate(rows):
        try:
            message = message_from_dict(row)
        except ValueError as error:
            raise ValueError(f'has a bad message {number} in "{name}": {error}') from error
        broken = next((call for call in message.tool_calls if call.error or not call.name), None)
        if broken and bad:
            calls = [_call_text(call.get("function", call)) for call in row["tool_calls"]]
            message.content, message.tool_calls = "\n".join(filter(None, [message.content, *calls])), []
        elif broken:
            what = f"broken call of {broken.name!r}" if broken.name else "call without a name"
            why = broken.error or "it needs one"
            raise ValueError(f'has a {what} in message {number} of "{name}": {why}')
        found.append(message)
    return found


def tools_in(columns: Mapping[str, Any]) -> list[ToolSpec]:
    specs = []
    for number, row in enumerate(as_list(columns.get("tools") or [], "tools")):
        try:
            spec = spec_from_dict(json.loads(row) if isinstance(row, str) else row)
            if isinstance(spec.parameters, str):  # some datasets keep them as JSON in a text
                spec.parameters = json.loads(spec.parameters)
            if not isinstance(spec.parameters, dict):
                raise ValueError(f"its parameters are {str(spec.parameters)[:40]}, not a JSON schema")
        except (ValueError, AttributeError) as error:
            raise ValueError(f'has a bad tool {number} in "tools": {error}') from error
        specs.append(spec)
    return specs


def as_list(value: Any, name: str) -> list[Any]:
    """Return a column that is a list, or JSON of one in a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'has a "{name}" that is a text and not JSON: {error}') from error
    if not isinstance(value, list | tuple):
        raise ValueError(f'has a "{name}" that is not a list but {str(value)[:40]}')
    return list(value)


def checked(messages: Sequence[Message], name: str = "messages") -> list[Message]:
    """Return the messages up to the last one of the assistant: what follows it teaches nothing."""
    ends = [number for number, message in enumerate(messages) if message.role == "assistant"]
    if not ends:
        raise ValueError(f'has no message of the assistant in "{name}", so there is nothing to learn from')
    if ends[0] == 0:
        raise ValueError(f'has "{name}" that begins with the assistant; first comes the system or the user')
    if twice := next((later for earlier, later in pairwise(ends) if later == earlier + 1), None):
        raise ValueError(f'has two messages of the assistant in a row in "{name}", up to message {twice}')
    for number in ends:
        if not (messages[number].content or messages[number].tool_calls or messages[number].reasoning):
            raise ValueError(f'has an empty message {number} of the assistant in "{name}"')
    return list(messages[: ends[-1] + 1])


def check_calls(conversation: Conversation, name: str, fits: Fits | None) -> None:
    """Raise where a call that is learned as a good one cannot be read or does not fit the tools that a row lists."""
    specs = {spec.name: spec for spec in conversation.tools}
    for number, message in enumerate(conversation.messages):
        place = f'in message {number} of "{name}"'
        if number < conversation.start or number in conversation.bad or message.role != "assistant":
            continue
        if problem := _broken_text(message.content):
            raise ValueError(f"has a broken call {place}: {problem}")
        for call in message.tool_calls if specs else []:
            if call.name not in specs:
                raise ValueError(f'calls {call.name!r} {place}, which is not in "tools": {", ".join(specs)}')
            if fits is not None and (problem := fits(specs[call.name], call.arguments)):
                raise ValueError(f"has a call {place} whose arguments do not fit: {problem}")


def named_replies(messages: list[Message]) -> list[Message]:
    """Give tool messages the name of their tool, by the id of its call or their place: some templates print it."""
    names: dict[str, str] = {}
    waiting: list[str] = []
    for message in messages:
        if message.role == "assistant":
            names |= {call.id: call.name for call in message.tool_calls if call.id}
            waiting = [call.name for call in message.tool_calls]
        elif message.role == "tool":
            following = waiting.pop(0) if waiting else None
            message.name = message.name or names.get(message.tool_call_id or "", following)
    return messages


def with_system(columns: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Put the column "system" before the messages, unless they begin with a system message of their own."""
    system = columns.get("system")
    if not isinstance(system, str) or not system.strip() or messages[0].role == "system":
        return messages
    return [Message("system", system), *messages]


def _broken_text(text: str) -> str | None:
    """Return what is wrong with JSON between the tags that most models write calls in."""
    for inside, end in re.findall(r"<tool_call>\s*(\{.*?)(</tool_call>|\Z)", text, re.DOTALL):
        if not end:
            return "its text has <tool_call> without </tool_call>"
        try:
            json.loads(inside, strict=False)
        except (ValueError, RecursionError) as error:
            return f"its text is not valid JSON: {error}"
    return None


def _call_text(function: Mapping[str, Any]) -> str:
    """Return a call as a model would have written it, whatever its arguments are."""
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {written}}}\n</tool_call>'


def _from_sharegpt(rows: Sequence[Mapping[str, Any]], name: str, bad: bool) -> list[dict[str, Any]]:
    """Return the same rows in OpenAI's form; what cannot be read as a call is a text where `bad`."""
    found: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        kind, value = str(row["from"]), row.get("value", "")
        if kind not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise ValueError(f'has a message {number} in "{name}" from {kind!r}; known are: {known}')
        message = {"role": SHAREGPT_ROLES[kind], "content": value}
        if kind == "tool_response" and not isinstance(value, str):
            message["content"] = json.dumps(value, ensure_ascii=False)
        if kind in ("function_call", "tool_call"):
            said = found.pop() if found and found[-1]["role"] == "assistant" else {}  # and then called
            try:
                calls = json.loads(value) if isinstance(value, str) else value
                calls = said.get("tool_calls", []) + (calls if isinstance(calls, list) else [calls])
                message = {"role": "assistant", "content": said.get("content"), "tool_calls": calls}
                message_from_dict(message)
            except (ValueError, RecursionError) as error:
                if not bad:
                    text = f'has a broken call in message {number} of "{name}": it is not valid JSON: {error}'
                    raise ValueError(text) from error
                texts = [said.get("content"), f"<tool_call>\n{value}\n</tool_call>"]
                message = {**said, "role": "assistant", "content": "\n".join(filter(None, texts))}
        found.append(message)
    return found
