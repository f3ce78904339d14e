"""Make texts fit for a model to read, for a terminal to show and for a file to keep: without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MAX_ERROR_CHARS = 300
# What such names hold, and what looks like this, is a secret. "max_tokens" is a count; "key" may be that of a song.
_SURE = re.compile(r"(?i)api[-_]?key|secret|passw|credential|authorization|cookie")
_MAYBE = re.compile(r"(?i)(^|[-_.])(token|auth|key|pass|pwd|dsn)$")
_VALUE = re.compile(
    r"\b(hf_|sk-|ghp_|github_pat_|xox[a-z]-)[\w-]{8,}|://[^/\s]*:[^/\s]*@|^(Bearer|Basic) \S{8,}$"
)
_NAMED = re.compile(r"-*([\w.-]+)\s*[=:]\s*((?:(?:Bearer|Basic) )?\S+)")  # --key=x, KEY=x, Cookie: x
SECRET_VARIABLES: set[str] = set()  # environment variables that somebody has named as the holder of a secret
# Marks that reorder the text around them: what is shown must be what is there.
REORDERING = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def valid_text(text: str) -> str:
    """Replace lone surrogates, which Python strings may hold and tokenizers refuse."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def clean(text: str) -> str:
    """Write out everything that a terminal would obey, an escape as \\x1b."""
    return "".join(
        character
        if character in "\n\t" or (character.isprintable() and character not in REORDERING)
        else character.encode("unicode_escape").decode()
        for character in text
    )


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


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


def is_secret(name: str, value: Any) -> bool:
    """Return whether a value should not be shown, which may be too careful."""
    return bool(_SURE.search(name) or _MAYBE.search(name) or _VALUE.search(str(value)))


def holds_secret(name: str, value: str) -> bool:
    """Return whether a value is a secret itself: not the name of what holds it, nor the key of a song."""
    if not value or name.endswith("_env") or "${" in value:
        return False
    long = len(value) >= 16 and re.search(r"\d", value) and " " not in value
    return bool(_SURE.search(name) or _VALUE.search(value) or (_MAYBE.search(name) and long))


def secrets_in(data: Any, key: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the place and the value of every secret in a tree of options, and in lists of arguments."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from secrets_in(value, (*key, str(name)))
    elif isinstance(data, list | tuple):
        for number, value in enumerate(data):
            yield from secrets_in(value, (*key, number))
            flag = str(data[number - 1]) if number else ""
            if flag.startswith("-") and isinstance(value, str) and holds_secret(flag, value):  # --api-key x
                yield (*key, number), value
    elif isinstance(data, str):
        name = next((str(part) for part in reversed(key) if isinstance(part, str)), "")
        found = _NAMED.fullmatch(data)
        if holds_secret(name, data):
            yield key, data
        elif found is not None and holds_secret(found[1], found[2]):
            yield key, found[2]


def environment_secrets() -> list[str]:
    """Return the secret values of the environment, the longest first, since one may be part of another."""
    found = {
        value
        for name, value in os.environ.items()
        if len(value) >= 8 and value[0] != "/" and (name in SECRET_VARIABLES or holds_secret(name, value))
    }
    return sorted(found, key=len, reverse=True)


def redacted(data: Any) -> Any:
    """Return JSON data, to be kept in a file, without the secrets of the environment."""
    return without(data, environment_secrets())
