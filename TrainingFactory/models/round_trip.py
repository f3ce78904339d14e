"""Comparison of an assistant turn with the message that is parsed back from its tokens."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

from TrainingFactory.types import Message


class RoundTripError(ValueError):
    """Raised for a message whose tokens this model's parser would read as a different message."""


def is_same_turn(parsed_message: Message, written_message: Message) -> bool:
    """Return whether two turns have the same thought, text and calls. Texts that differ only in how accents are encoded
    are equal, because many tokenizers normalize text to NFC."""

    def normalize_message(message: Message) -> list[str]:
        texts = [message.content.strip(), (message.reasoning or "").strip()]
        calls = [json.dumps(_normalize([call.name, call.arguments])) for call in message.tool_calls]
        return [*map(_normalize, texts), *calls]

    return normalize_message(parsed_message) == normalize_message(written_message)


def _normalize(value: Any) -> Any:
    """Return JSON data with its strings in NFC, and objects as sorted lists of their pairs, which keep equal keys."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if isinstance(value, dict):
        return sorted([_normalize(key), json.dumps(_normalize(child))] for key, child in value.items())
    return [_normalize(child) for child in value] if isinstance(value, list | tuple) else value


def describe_difference(family: str, written_message: Message, parsed_message: Message) -> str:
    def summarize(message: Message) -> str:
        parts = [f"thought {message.reasoning!r}"] if message.reasoning else []
        parts += [f"text {message.content!r}"] if message.content else []
        for call in message.tool_calls:
            parts.append(f"call {call.name}({json.dumps(call.arguments, ensure_ascii=False)})")
        return ", ".join(parts) or "nothing"

    texts = summarize(written_message), summarize(parsed_message)
    if len({unicodedata.normalize("NFKC", text) for text in texts}) == 1:  # they look the same
        escaped_texts = [ascii(text)[1:-1][:300] for text in texts]
        return (
            f"the tokenizer of this model (family {family!r}) replaces characters by others that look the same: "
            f"{escaped_texts[0]} becomes {escaped_texts[1]}; normalize the text of your data to NFKC"
        )
    return (
        f"this model (family {family!r}) would not read back the turn that it learns to write: {texts[0][:300]} is "
        f"parsed as {texts[1][:300]}"
    )
