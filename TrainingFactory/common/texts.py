"""Sanitized texts for models, terminals and files: valid Unicode, bounded length, no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_ERROR_CHARS = 300
# Names and values that indicate a secret. Not every match of _MAYBE_NAME is one: "key" may be the key of a song.
_SURE_NAME = re.compile(r"(?i)api[-_]?key|secret|passw|credential|authorization|cookie")
_MAYBE_NAME = re.compile(r"(?i)(^|[-_.])(token|auth|key|pass|pwd|dsn)$")
_SURE_TEXT = re.compile(
    r"\b(hf_|sk-|ghp_|github_pat_|xox[a-z]-)[\w-]{8,}|://[^/\s]*:[^/\s]*@|^(Bearer|Basic) \S{8,}$"
)
_ASSIGNMENT = re.compile(r"-*([\w.-]+)\s*[=:]\s*((?:(?:Bearer|Basic) )?\S+)")  # --key=x, KEY=x, Cookie: x
SECRET_VARIABLES: set[str] = set()  # environment variables that a config names as holding a secret
# Bidirectional control characters, which make a terminal show text in another order than it is stored.
BIDI_CONTROLS = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which Python strings may contain and tokenizers reject."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def escape_control(text: str) -> str:
    """Escape the control characters that a terminal would interpret: ESC becomes \\x1b."""
    return "".join(
        character
        if character in "\n\t" or (character.isprintable() and character not in BIDI_CONTROLS)
        else character.encode("unicode_escape").decode()
        for character in text
    )


def pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def truncate_middle(text: str, max_chars: int) -> str:
    """Truncate a text to about `max_chars` characters, with a marker in the middle, and make it valid Unicode."""
    if len(text) > max_chars:
        num_head, num_hidden = max_chars * 3 // 4, len(text) - max_chars
        text = f"{text[:num_head]}\n[... {num_hidden} characters cut ...]\n{text[num_head + num_hidden :]}"
    return replace_surrogates(text)


def describe(error: BaseException) -> str:
    """Return the type and message of an exception, in one short line."""
    text = format_message(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def format_message(error: BaseException) -> str:
    """Return the message of an exception, in one short line."""
    try:
        text = str(error)
    except Exception:  # `__str__` may be a user's code
        text = ""
    return escape_control(" ".join(text.split())[:MAX_ERROR_CHARS])


def redact(data: Any, secrets: Sequence[str]) -> Any:
    """Return JSON data with `secrets` replaced by *** in all strings, including keys."""
    if isinstance(data, str):
        for secret in secrets:
            data = data.replace(secret, "***")
        return data
    if isinstance(data, list):
        return [redact(element, secrets) for element in data]
    if isinstance(data, dict):
        return {redact(key, secrets): redact(value, secrets) for key, value in data.items()}
    return data


def is_secret(name: str, value: Any) -> bool:
    """Return whether to hide a value in messages; when in doubt, hide it."""
    return bool(_SURE_NAME.search(name) or _MAYBE_NAME.search(name) or _SURE_TEXT.search(str(value)))


def holds_secret(name: str, value: str) -> bool:
    """Return whether a value is a secret itself, not a reference (`*_env`, `${...}`) or a harmless "key"."""
    if not value or name.endswith("_env") or "${" in value:
        return False
    is_key = len(value) >= 16 and re.search(r"\d", value) and " " not in value
    return bool(_SURE_NAME.search(name) or _SURE_TEXT.search(value) or (_MAYBE_NAME.search(name) and is_key))


def iter_secrets(data: Any, key: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield key and value of every secret in nested options and in lists of command-line arguments."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from iter_secrets(value, (*key, str(name)))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from iter_secrets(value, (*key, index))
            flag = str(data[index - 1]) if index else ""
            if flag.startswith("-") and isinstance(value, str) and holds_secret(flag, value):  # --api-key x
                yield (*key, index), value
    elif isinstance(data, str):
        name = next((str(key_part) for key_part in reversed(key) if isinstance(key_part, str)), "")
        match = _ASSIGNMENT.fullmatch(data)
        if holds_secret(name, data):
            yield key, data
        elif match is not None and holds_secret(match[1], match[2]):
            yield key, match[2]


def find_environment_secrets() -> list[str]:
    """Return the secret values of the environment variables, longest first, because one may contain another."""
    secret_values = {
        value
        for name, value in os.environ.items()
        if len(value) >= 8 and value[0] != "/" and (name in SECRET_VARIABLES or holds_secret(name, value))
    }
    return sorted(secret_values, key=len, reverse=True)


def redact_environment(data: Any) -> Any:
    """Return JSON data with the secrets of the environment variables replaced by ***."""
    return redact(data, find_environment_secrets())
