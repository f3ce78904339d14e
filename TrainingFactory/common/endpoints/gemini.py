"""Gemini's `generateContent`."""

from __future__ import annotations

from typing import Any

from TrainingFactory.common.endpoints.messages import (
    Fault,
    ModelReply,
    ModelRequest,
    drop_nulls,
    make_call_id,
    make_reply,
)
from TrainingFactory.common.endpoints.transport import Endpoint
from TrainingFactory.common.image_parts import make_gemini_blob, make_gemini_parts
from TrainingFactory.common.images import as_text
from TrainingFactory.types import Message, ToolCall, ToolSpec

REFUSALS = ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE", "MODEL_ARMOR")


class GeminiEndpoint(Endpoint):
    """Client of Gemini's `generateContent`. `options` are fields of the request's `generationConfig`."""

    PATH = "/models/{model}:generateContent"
    EXPECTED_CONTENT = "a candidate of generateContent"

    def make_headers(self, key: str | None) -> dict[str, str]:
        return {"x-goog-api-key": key} if key else {}

    def make_body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {"contents": make_contents(request)}
        if request.system_text:
            body["systemInstruction"] = {"parts": [{"text": request.system_text}], "role": "user"}
        if request.tools:
            body["tools"] = [{"functionDeclarations": [declare_function(spec) for spec in request.tools]}]
        fields = {"temperature": request.temperature, "maxOutputTokens": request.max_tokens}
        generation_config = drop_nulls(drop_nulls(fields) | self.options)
        if isinstance(generation_config.get("seed"), int):
            generation_config["seed"] += request.sample_index
        return body | ({"generationConfig": generation_config} if generation_config else {})

    def parse_reply(self, response: Any, request: ModelRequest) -> ModelReply:
        usage = response.get("usageMetadata") or {}
        candidates = response.get("candidates") or []
        if not candidates and response["promptFeedback"]["blockReason"]:
            return make_reply(request, Message("assistant"), usage.get("promptTokenCount"), 0, "refused")
        content: dict[str, Any] = candidates[0].get("content") or {"role": "model"}
        message, num_calls = Message("assistant"), 0
        for part in content.get("parts") or []:
            if part.get("thought"):
                message.reasoning = (message.reasoning or "") + part.get("text", "")
            elif call := part.get("functionCall"):
                call.setdefault("id", make_call_id(request, num_calls))  # so that the response can name it
                num_calls += 1
                message.tool_calls.append(ToolCall(call["name"], dict(call.get("args") or {}), call["id"]))
            else:
                message.content += part.get("text", "")
        output = usage.get("candidatesTokenCount", 0) + usage.get("thoughtsTokenCount", 0) if usage else None
        reason = candidates[0].get("finishReason")
        fault: Fault | None = "cut" if reason == "MAX_TOKENS" else "refused" if reason in REFUSALS else None
        return make_reply(request, message, usage.get("promptTokenCount"), output, fault, content)


def make_contents(request: ModelRequest) -> list[dict[str, Any]]:
    """Return the messages with alternating roles, user and model. Consecutive messages of one role are merged."""
    contents: list[dict[str, Any]] = []
    for position, message in request.dialogue:
        role = "model" if message.role == "assistant" else "user"
        original_content = request.original_messages.get(position)
        parts = original_content.get("parts", []) if original_content else make_parts(message)
        if contents and contents[-1]["role"] == role:
            contents[-1]["parts"] = contents[-1]["parts"] + parts
        elif parts:
            contents.append({"parts": parts, "role": role})
    return contents


def make_parts(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        response: dict[str, Any] = {"id": message.tool_call_id, "name": message.name}
        response["response"] = {"result": as_text(message.content, message.images)}
        if message.images:
            response["parts"] = [{"inlineData": make_gemini_blob(image)} for _, image in message.images]
        return [{"functionResponse": response}]
    call_parts = [
        {"functionCall": {"id": call.id, "args": call.arguments, "name": call.name}}
        for call in message.tool_calls
    ]
    return [*make_gemini_parts(message), *call_parts]


def declare_function(spec: ToolSpec) -> dict[str, Any]:
    return {"name": spec.name, "description": spec.description, "parameters_json_schema": spec.parameters}
