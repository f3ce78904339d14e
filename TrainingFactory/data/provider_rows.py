"""Rows for tuning at a provider, from the rows of `convert`: supervised (sft) and preference pairs (dpo).

    openai    messages, tools                                    input, preferred_output, non_preferred_output
    gemini    systemInstruction, contents, tools                 contents, completions with scores 1 and 0
    bedrock   schemaVersion, system, messages, toolConfig        none

A pair at a provider compares two single messages. Episodes that differ in more than their last message are skipped.
No row has been sent to a provider: the formats are those of the providers' documents.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Provider = Literal["openai", "gemini", "bedrock"]
Row = dict[str, Any]
BEDROCK_VERSION = "bedrock-conversation-2024"
BEDROCK_RESERVED_PREFIXES = ("User:", "Bot:", "Assistant:", "System:", "<image>", "<video>", "[EOS]")
TOOL_NAME_PATTERN = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CALL_ID = re.compile(r"[a-zA-Z0-9_-]+")
SCHEMA_KEYS = (
    "type",
    "description",
    "properties",
    "required",
    "items",
    "enum",
    "nullable",
    "anyOf",
    "format",
)
OPENAI_MIN_ROWS = 10  # smaller files are rejected


class UnfitRowError(ValueError):
    """Raised for a row that the provider's format cannot represent."""


class ProviderFormat(NamedTuple):
    convert_row: Callable[[Row, list[Row]], Row]
    convert_pair: Callable[[Row, list[Row], Row, Row], Row] | None  # row, prompt, chosen and rejected message


def to_provider_rows(rows: Sequence[Row], provider: Provider, drops: Counter[str]) -> list[Row]:
    """Convert rows to the provider's format; count the rows that it cannot represent in `drops` by reason."""
    provider_format, converted_rows = FORMATS[provider], []
    for row in rows:
        if "chosen" in row and provider_format.convert_pair is None:
            raise ValueError(f"{provider} has no tuning on pairs; use --to {provider} without dpo")
        if not {"chosen", "messages", "completion"} & row.keys() or "label" in row or "labels" in row:
            raise ValueError(f"the format {provider} is for sft and dpo rows; use --to {provider}")
        try:
            converted_rows.append(_check_row(row, provider_format))
        except UnfitRowError as error:
            drops[f"{provider}: {error}"] += 1
    return converted_rows


def _check_row(row: Row, provider_format: ProviderFormat) -> Row:
    if row.get("images"):
        raise UnfitRowError("the row has images, which this format does not carry")
    for tool in row.get("tools", ()):
        if not TOOL_NAME_PATTERN.fullmatch(tool["function"]["name"]):
            raise UnfitRowError(f"tool name {tool['function']['name']!r:.70}; use letters, digits, _ and -")
    if "chosen" in row:
        assert provider_format.convert_pair is not None
        shared_messages, chosen, rejected = _split_at_difference(row)
        prompt = [*_remove_weights(row["prompt"]), *shared_messages]
        _check_messages([*prompt, chosen])
        _check_messages([*prompt, rejected])
        return provider_format.convert_pair(row, prompt, chosen, rejected)
    messages = row["messages"] if "messages" in row else [*_remove_weights(row["prompt"]), *row["completion"]]
    _check_messages(messages)
    return provider_format.convert_row(row, messages)


def _split_at_difference(row: Row) -> tuple[list[Row], Row, Row]:
    """Return the common beginning of the two completions, and the differing message of each."""
    comparable_sides = [[_without_ids(message) for message in row[side]] for side in ("chosen", "rejected")]
    num_shared_messages = 0
    for chosen, rejected in zip(*comparable_sides, strict=False):
        if chosen != rejected:
            break
        num_shared_messages += 1
    remainders = [row[side][num_shared_messages:] for side in ("chosen", "rejected")]
    if any(len(remainder) != 1 or remainder[0]["role"] != "assistant" for remainder in remainders):
        raise UnfitRowError("the episodes of a pair differ in more than their last message")
    return _remove_weights(row["chosen"][:num_shared_messages]), remainders[0][0], remainders[1][0]


def _without_ids(message: Row) -> Row:
    """Return a message without the ids of calls, which differ between equal episodes."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {key: value for key, value in message.items() if key != "tool_call_id"} | {"tool_calls": calls}


def _remove_weights(messages: Sequence[Row]) -> list[Row]:
    """Set weight 0 on the assistant's messages, so that they are not trained."""
    return [message | {"weight": 0} if message["role"] == "assistant" else message for message in messages]


def _check_messages(messages: Sequence[Row]) -> None:
    """Raise UnfitRowError unless every call has one result and the last message is the assistant's."""
    if not messages or messages[-1]["role"] != "assistant":
        raise UnfitRowError("the last message is not the assistant's")
    if not any(message["role"] == "user" for message in messages):
        raise UnfitRowError("there is no user message")
    call_ids: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message.get("tool_call_id") not in call_ids:
                raise UnfitRowError("a tool result answers no call")
            call_ids.remove(message["tool_call_id"])
            continue
        if call_ids:
            raise UnfitRowError("a call has no result")
        call_ids = [call["id"] for call in message.get("tool_calls", ())]
        if not all(CALL_ID.fullmatch(call_id) for call_id in call_ids) or len(set(call_ids)) < len(call_ids):
            raise UnfitRowError("ids of calls must be unique, of letters, digits, _ and -")
        if message["role"] == "assistant" and not message["content"] and not call_ids:
            raise UnfitRowError("an assistant message is empty")


# OpenAI


def _to_openai_message(message: Row) -> Row:
    keys = ("role", "tool_calls", "tool_call_id", "weight")
    row = {key: message[key] for key in keys if key in message}
    return row if "tool_calls" in row and not message["content"] else row | {"content": message["content"]}


def _to_openai_tools(row: Row) -> Row:
    return {"tools": row["tools"], "parallel_tool_calls": True} if row.get("tools") else {}


def _to_openai_row(row: Row, messages: list[Row]) -> Row:
    return {"messages": [_to_openai_message(message) for message in messages]} | _to_openai_tools(row)


def _to_openai_pair(row: Row, prompt: list[Row], chosen: Row, rejected: Row) -> Row:
    messages = [_to_openai_message({k: v for k, v in message.items() if k != "weight"}) for message in prompt]
    outputs = {
        "preferred_output": [_to_openai_message(chosen)],
        "non_preferred_output": [_to_openai_message(rejected)],
    }
    return {"input": {"messages": messages} | _to_openai_tools(row)} | outputs


# Gemini


def _to_gemini_parts(message: Row, name_by_id: dict[str, str]) -> list[Row]:
    if message["role"] == "tool":
        response = {"name": name_by_id[message["tool_call_id"]], "response": {"result": message["content"]}}
        return [{"functionResponse": response}]
    calls = []
    for call in message.get("tool_calls", ()):
        name_by_id[call["id"]] = call["function"]["name"]
        calls.append(
            {
                "functionCall": {
                    "name": call["function"]["name"],
                    "args": json.loads(call["function"]["arguments"]),
                }
            }
        )
    return [*([{"text": message["content"]}] if message["content"] else []), *calls]


def _to_gemini_contents(messages: Sequence[Row]) -> list[Row]:
    contents: list[Row] = []
    name_by_id: dict[str, str] = {}
    for message in messages:
        if message["role"] == "system":
            continue
        role = "model" if message["role"] == "assistant" else "user"
        parts = _to_gemini_parts(message, name_by_id)
        if contents and contents[-1]["role"] == role:
            contents[-1]["parts"] += parts
        else:
            contents.append({"role": role, "parts": parts})
    return contents


def _to_gemini_schema(schema: Any) -> Any:
    """Convert a JSON schema to an OpenAPI schema with only the keys that Gemini supports."""
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema:
        raise UnfitRowError("a tool's schema contains $ref")
    row = {key: schema[key] for key in SCHEMA_KEYS if key in schema}
    if isinstance(kind := row.get("type"), list):
        row |= {"type": next((name for name in kind if name != "null"), "string"), "nullable": "null" in kind}
    if isinstance(row.get("type"), str):
        row["type"] = row["type"].upper()
    if "properties" in row:
        row["properties"] = {name: _to_gemini_schema(child) for name, child in row["properties"].items()}
    if "items" in row:
        row["items"] = _to_gemini_schema(row["items"])
    if "anyOf" in row:
        row["anyOf"] = [_to_gemini_schema(child) for child in row["anyOf"]]
    return row


def _to_gemini_shared_fields(row: Row, messages: Sequence[Row]) -> Row:
    shared_fields: Row = {}
    if system_text := _join_system_texts(messages):
        shared_fields["systemInstruction"] = {"role": "system", "parts": [{"text": system_text}]}
    functions = [tool["function"] for tool in row.get("tools", ())]
    if functions:
        declarations = [
            function | {"parameters": _to_gemini_schema(function["parameters"])} for function in functions
        ]
        shared_fields["tools"] = [{"functionDeclarations": declarations}]
    return shared_fields


def _to_gemini_row(row: Row, messages: list[Row]) -> Row:
    return _to_gemini_shared_fields(row, messages) | {"contents": _to_gemini_contents(messages)}


def _to_gemini_pair(row: Row, prompt: list[Row], chosen: Row, rejected: Row) -> Row:
    completions = [
        {"score": score, "completion": {"role": "model", "parts": _to_gemini_parts(message, {})}}
        for score, message in ((1, chosen), (0, rejected))
    ]
    return _to_gemini_shared_fields(row, prompt) | {
        "contents": _to_gemini_contents(prompt),
        "completions": completions,
    }


# Bedrock


def _to_bedrock_blocks(message: Row) -> list[Row]:
    if message["role"] == "tool":
        result = {"toolUseId": message["tool_call_id"], "content": [{"text": message["content"]}]}
        return [{"toolResult": result}]
    tool_uses = []
    for call in message.get("tool_calls", ()):
        tool_use = {"toolUseId": call["id"], "name": call["function"]["name"]}
        tool_uses.append({"toolUse": tool_use | {"input": json.loads(call["function"]["arguments"])}})
    if message["role"] == "user" and message["content"].startswith(BEDROCK_RESERVED_PREFIXES):
        raise UnfitRowError(f"a prompt begins with one of {', '.join(BEDROCK_RESERVED_PREFIXES)}")
    return [*([{"text": message["content"]}] if message["content"] else []), *tool_uses]


def _to_bedrock_row(row: Row, messages: list[Row]) -> Row:
    system = _join_system_texts(messages)
    turns: list[Row] = []
    for message in messages:
        if message["role"] == "system":
            continue
        role = "assistant" if message["role"] == "assistant" else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += _to_bedrock_blocks(message)
        else:
            turns.append({"role": role, "content": _to_bedrock_blocks(message)})
    if turns[0]["role"] != "user":
        raise UnfitRowError("the first message is not the user's")
    bedrock_row: Row = {"schemaVersion": BEDROCK_VERSION} | ({"system": [{"text": system}]} if system else {})
    bedrock_row["messages"] = turns
    if row.get("tools"):
        functions = [tool["function"] for tool in row["tools"]]
        bedrock_row["toolConfig"] = {
            "tools": [{"toolSpec": _to_bedrock_tool_spec(function)} for function in functions]
        }
    return bedrock_row


def _to_bedrock_tool_spec(function: Row) -> Row:
    description = {"description": function["description"]} if function.get("description") else {}
    return {"name": function["name"]} | description | {"inputSchema": {"json": function["parameters"]}}


def _join_system_texts(messages: Sequence[Row]) -> str:
    return "\n\n".join(message["content"] for message in messages if message["role"] == "system")


FORMATS: dict[Provider, ProviderFormat] = {
    "openai": ProviderFormat(_to_openai_row, _to_openai_pair),
    "gemini": ProviderFormat(_to_gemini_row, _to_gemini_pair),
    "bedrock": ProviderFormat(_to_bedrock_row, None),
}
