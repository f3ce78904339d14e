"""OpenAI's `/chat/completions`, which vLLM, SGLang, `tfactory serve` and most hosts speak too."""

from __future__ import annotations

from typing import Any

from TrainingFactory.common.endpoints.messages import (
    Fault,
    ModelReply,
    ModelRequest,
    reply_with_usage,
    without_nulls,
)
from TrainingFactory.common.endpoints.transport import Endpoint
from TrainingFactory.common.openai_format import message_from_dict, message_to_dict, spec_to_dict
from TrainingFactory.types import Message

OPENAI_HOST = "api.openai.com"  # deprecates max_tokens, which other servers expect


class ChatEndpoint(Endpoint):
    PATH = "/chat/completions"
    CONTENT = "a chat completion"

    def headers(self, key: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"} if key else {}

    def body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [chat_message(message) for message in request.messages],
        }
        if request.tools:
            body["tools"] = [spec_to_dict(spec) for spec in request.tools]
        limit = "max_completion_tokens" if self.host == OPENAI_HOST else "max_tokens"
        fields = {"temperature": request.temperature, limit: request.max_tokens}
        body |= without_nulls(without_nulls(fields) | self.options)
        if isinstance(body.get("seed"), int):  # a fixed seed would make all samples of a prompt equal
            body["seed"] += request.number
        return body

    def reply(self, answer: Any, request: ModelRequest) -> ModelReply:
        [choice, *_] = answer["choices"]
        row, finish = choice["message"], choice.get("finish_reason")
        message = message_from_dict({"role": "assistant"} | row)
        fault: Fault | None = "cut" if finish == "length" else None
        if finish == "content_filter" or row.get("refusal"):
            fault = "refused"
            message.content = message.content or str(row.get("refusal") or "")
        usage = answer.get("usage") or {}
        return reply_with_usage(
            request, message, usage.get("prompt_tokens"), usage.get("completion_tokens"), fault
        )


def chat_message(message: Message) -> dict[str, Any]:
    """Convert a message without keys that strict endpoints reject."""
    row = message_to_dict(message)
    row.pop("reasoning_content", None)
    row.pop("name", None)
    for call in row.get("tool_calls", ()):
        call.pop("error", None)
    return row
