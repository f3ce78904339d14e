"""Requests to model endpoints and their replies, independent of the wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from TrainingFactory.common.openai_format import message_from_dict, message_to_dict
from TrainingFactory.types import Message, ToolSpec

CHARS_PER_TOKEN = 4  # estimate for endpoints that do not report token counts
TOKENS_PER_IMAGE = 1000  # the same
Fault = Literal["refused", "cut"]


@dataclass(slots=True, frozen=True)
class ModelRequest:
    """A conversation to continue. `sample_index` is the index among several samples of the same request.
    `original_messages` are the endpoint's own forms of its earlier messages by position. They are sent back unchanged,
    because a provider signs the thoughts in them. A field that is None takes the endpoint's default."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    sample_index: int = 0
    temperature: float | None = None
    max_tokens: int | None = None
    original_messages: Mapping[int, Any] = field(default_factory=dict[int, Any])

    @property
    def system_text(self) -> str:
        return "\n\n".join(message.content for message in self.messages if message.role == "system")

    @property
    def dialogue(self) -> list[tuple[int, Message]]:
        """Return all messages except those of the system, with their positions."""
        return [(index, message) for index, message in enumerate(self.messages) if message.role != "system"]


@dataclass(slots=True, frozen=True)
class ModelReply:
    """Reply of a model, with its token counts. `original` is the endpoint's own form of the message, if it must be sent
    back unchanged."""

    message: Message
    input_tokens: int
    output_tokens: int
    estimated: bool = False  # token counts are estimates
    fault: Fault | None = None  # a billed reply that is refused, or truncated at max_tokens
    original: Any = None

    @property
    def text(self) -> str:
        return self.message.content

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"message": message_to_dict(self.message), "fault": self.fault}
        row |= {"tokens": [self.input_tokens, self.output_tokens], "estimated": self.estimated}
        return row | ({} if self.original is None else {"original": self.original})

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ModelReply:
        message = message_from_dict(row["message"])
        prompt_tokens, output_tokens = row["tokens"]
        return cls(message, prompt_tokens, output_tokens, row["estimated"], row["fault"], row.get("original"))


def make_reply(
    request: ModelRequest,
    message: Message,
    prompt_tokens: Any,
    output_tokens: Any,
    fault: Fault | None,
    original: Any = None,
) -> ModelReply:
    """Return the reply with the endpoint's token counts, or with estimates if it reports none."""
    for index, call in enumerate(message.tool_calls):
        call.id = call.id or make_call_id(request, index)
    if isinstance(prompt_tokens, int) and isinstance(output_tokens, int):
        return ModelReply(message, prompt_tokens, output_tokens, fault=fault, original=original)
    prompt_chars = sum(len(turn.content) for turn in request.messages)
    prompt_chars += sum(len(turn.images) for turn in request.messages) * TOKENS_PER_IMAGE * CHARS_PER_TOKEN
    reply_chars = len(message.content) + sum(len(str(call.arguments)) for call in message.tool_calls)
    token_estimates = prompt_chars // CHARS_PER_TOKEN + 1, reply_chars // CHARS_PER_TOKEN + 1
    return ModelReply(message, *token_estimates, estimated=True, fault=fault, original=original)


def make_call_id(request: ModelRequest, index: int) -> str:
    """Return an id for a call without one, unique in its conversation."""
    return f"call_{len(request.messages)}_{index}"


def drop_nulls(options: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in options.items() if value is not None}
