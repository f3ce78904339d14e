"""Make foreign texts fit for a model to read and for a terminal to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_ERROR_CHARS = 300
# Marks that reorder the text around them: what is shown must be what is there.
REORDERING = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def valid_text(text: str) -> str:
    """Replace lone surrogates, which Python strings may hold and tokenizers refuse."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def clean(text: str) -> str:
    """Write out everything that a terminal would obey, an escape as \\x1b."""
    return "".join(
        character
        if character in "\n\t" or (character.isprintable() and character not in REORDERING)
        else character.encode("unicode_escape").decode()
        for character in text
    )


def bounded(text: str, limit: int) -> str:
    """Cut a text, so that no later step has to handle one of absurd size, and make it valid Unicode."""
    if len(text) > limit:
        head, cut = limit * 3 // 4, len(text) - limit
        text = f"{text[:head]}\n[... {cut} characters cut ...]\n{text[head + cut :]}"
    return valid_text(text)


def describe(error: BaseException) -> str:
    """Describe an exception in one short line."""
    text = message_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def message_of(error: BaseException) -> str:
    """Return what an exception says, in one short line."""
    try:
        text = str(error)
    except Exception:  # the exception's own code is foreign too
        text = ""
    return clean(" ".join(text.split())[:MAX_ERROR_CHARS])


def without(data: Any, secrets: Sequence[str]) -> Any:
    """Return JSON data with *** in place of the secrets in all its texts."""
    if isinstance(data, str):
        for secret in secrets:
            data = data.replace(secret, "***")
        return data
    if isinstance(data, list):
        return [without(item, secrets) for item in data]
    if isinstance(data, dict):
        return {without(key, secrets): without(value, secrets) for key, value in data.items()}
    return data
