"""Anthropic's `/messages`."""

from __future__ import annotations

from typing import Any

from TrainingFactory.common.endpoints.messages import Fault, ModelReply, ModelRequest, drop_nulls, make_reply
from TrainingFactory.common.endpoints.transport import Endpoint
from TrainingFactory.common.image_parts import make_anthropic_blocks
from TrainingFactory.types import Message, ToolCall

API_VERSION = "2026-10-21"
DEFAULT_MAX_TOKENS = 1024  # the endpoint requires max_tokens
INPUT_COUNT_KEYS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
FAULTS: dict[Any, Fault] = {
    "refusal": "refused",
    "max_tokens": "cut",
    "model_context_window_exceeded": "cut",
}


class MessagesEndpoint(Endpoint):
    """Client of Anthropic's `/messages`. It sends no temperature, because the current API has none; `options` can add
    one for other servers."""

    PATH = "/messages"
    EXPECTED_CONTENT = "a message"

    def make_headers(self, key: str | None) -> dict[str, str]:
        return {"anthropic-version": API_VERSION} | ({"Authorization": f"Bearer {key}"} if key else {})

    def make_body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": _merge_roles(request)}
        if request.system_text:
            body["system"] = request.system_text
        if request.tools:
            body["tools"] = [
                {"name": spec.name, "description": spec.description, "input_schema": spec.parameters}
                for spec in request.tools
            ]
        return body | drop_nulls({"max_tokens": request.max_tokens or DEFAULT_MAX_TOKENS} | self.options)

    def parse_reply(self, response: Any, request: ModelRequest) -> ModelReply:
        message, blocks = Message("assistant"), list[dict[str, Any]](response["content"])
        for block in blocks:
            if block["type"] == "text":
                message.content += block["text"]
            elif block["type"] == "thinking":
                message.reasoning = (message.reasoning or "") + block["thinking"]
            elif block["type"] == "tool_use":
                message.tool_calls.append(ToolCall(block["name"], dict(block["input"]), block["id"]))
        usage = response.get("usage") or {}
        input_counts = [usage.get(name) or 0 for name in INPUT_COUNT_KEYS]
        prompt_tokens = sum(input_counts) if isinstance(usage.get("input_tokens"), int) else None
        fault = FAULTS.get(response.get("stop_reason"))
        return make_reply(request, message, prompt_tokens, usage.get("output_tokens"), fault, blocks)


def _merge_roles(request: ModelRequest) -> list[dict[str, Any]]:
    """Return the messages with alternating roles, user and assistant. Consecutive messages of one role are merged."""
    anthropic_messages: list[dict[str, Any]] = []
    for position, message in request.dialogue:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = request.original_messages.get(position) or _to_blocks(message)
        if anthropic_messages and anthropic_messages[-1]["role"] == role:
            anthropic_messages[-1]["content"] = anthropic_messages[-1]["content"] + blocks
        elif blocks:
            anthropic_messages.append({"role": role, "content": blocks})
    for anthropic_message in anthropic_messages:
        if [block["type"] for block in anthropic_message["content"]] == ["text"]:
            anthropic_message["content"] = anthropic_message["content"][0]["text"]
    return anthropic_messages


def _to_blocks(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        content = make_anthropic_blocks(message) if message.images else message.content
        return [{"type": "tool_result", "tool_use_id": message.tool_call_id, "content": content}]
    call_blocks = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in message.tool_calls
    ]
    return [*make_anthropic_blocks(message), *call_blocks]
