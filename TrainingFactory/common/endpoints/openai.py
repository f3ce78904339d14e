"""OpenAI's `/chat/completions`, which vLLM, SGLang, `tfactory serve` and most hosts also support."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from TrainingFactory.common.endpoints.messages import Fault, ModelReply, ModelRequest, drop_nulls, make_reply
from TrainingFactory.common.endpoints.transport import Endpoint
from TrainingFactory.common.images import as_text, join_pieces
from TrainingFactory.common.openai_format import message_from_dict, message_to_dict, spec_to_dict
from TrainingFactory.types import Image, Message

OPENAI_HOST = "api.openai.com"  # deprecates max_tokens, which other servers expect


class ChatEndpoint(Endpoint):
    PATH = "/chat/completions"
    EXPECTED_CONTENT = "a chat completion"

    def make_headers(self, key: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"} if key else {}

    def make_body(self, request: ModelRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [make_chat_message(message) for message in move_tool_images(request.messages)],
        }
        if request.tools:
            body["tools"] = [spec_to_dict(spec) for spec in request.tools]
        limit_key = "max_completion_tokens" if self.host == OPENAI_HOST else "max_tokens"
        fields = {"temperature": request.temperature, limit_key: request.max_tokens}
        body |= drop_nulls(drop_nulls(fields) | self.options)
        if isinstance(body.get("seed"), int):  # a fixed seed would make all samples of a prompt equal
            body["seed"] += request.sample_index
        return body

    def parse_reply(self, response: Any, request: ModelRequest) -> ModelReply:
        [choice, *_] = response["choices"]
        message_row, finish_reason = choice["message"], choice.get("finish_reason")
        message = message_from_dict({"role": "assistant"} | message_row)
        fault: Fault | None = "cut" if finish_reason == "length" else None
        if finish_reason == "content_filter" or message_row.get("refusal"):
            fault = "refused"
            message.content = message.content or str(message_row.get("refusal") or "")
        usage = response.get("usage") or {}
        return make_reply(request, message, usage.get("prompt_tokens"), usage.get("completion_tokens"), fault)


def move_tool_images(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages, with the images of tool results moved to a user message after the results, because chat
    completions accept images from users only."""
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        messages_of_role = list(group)
        if not is_result or not any(message.images for message in messages_of_role):
            yield from messages_of_role
            continue
        pieces: list[str | Image] = []
        for message in messages_of_role:
            yield replace(message, content=as_text(message.content, message.images), images=[])
            if message.images:
                pieces += [f"Images of the result of {message.name or 'the tool'}:"]
                pieces += [image for _, image in message.images]
        content, images = join_pieces(pieces, "\n")
        yield Message("user", content, images=images)


def make_chat_message(message: Message) -> dict[str, Any]:
    """Convert a message to the dict of a chat completion. Omit the keys that strict endpoints reject."""
    message_row = message_to_dict(message)
    message_row.pop("reasoning_content", None)
    message_row.pop("name", None)
    for call in message_row.get("tool_calls", ()):
        call.pop("error", None)
    return message_row
