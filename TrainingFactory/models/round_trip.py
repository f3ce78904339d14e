"""Comparison of an assistant turn with the message that is parsed back from its tokens."""

from __future__ import annotations

import json

from TrainingFactory.types import Message


class RoundTripError(ValueError):
    """Raised for a message whose tokens this model's parser would read as a different message."""


def same_turn(read: Message, written: Message) -> bool:
    def calls(message: Message) -> list[tuple[str, str]]:
        return [(call.name, json.dumps(call.arguments, sort_keys=True)) for call in message.tool_calls]

    return (
        read.content.strip() == written.content.strip()
        and (read.reasoning or "").strip() == (written.reasoning or "").strip()
        and calls(read) == calls(written)
    )


def describe_difference(family: str, written: Message, read: Message) -> str:
    def summary(message: Message) -> str:
        parts = [f"thought {message.reasoning!r}"] if message.reasoning else []
        parts += [f"text {message.content!r}"] if message.content else []
        for call in message.tool_calls:
            parts.append(f"call {call.name}({json.dumps(call.arguments, ensure_ascii=False)})")
        return ", ".join(parts)[:300] or "nothing"

    return (
        f"this model (family {family!r}) would not read back the turn that it learns to write: {summary(written)} is "
        f"parsed as {summary(read)}"
    )
