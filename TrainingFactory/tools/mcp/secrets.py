"""What must not leave the config of a server: found by its name or its place, and taken out of other texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import parse_qsl, unquote, urlsplit

SHORTEST = 8  # characters; shorter ones stand in any text by chance
_SECRET_NAME = re.compile(
    r"key|token|secret|pass|pwd|auth(?!ors?(?![a-z]))|credential|cookie|dsn", re.IGNORECASE
)


def secret_values(
    named: Iterable[tuple[str, str]], headers: Iterable[str], texts: Iterable[str]
) -> list[str]:
    """Return headers, values whose name says that they are secret, and what is secret in values that are URLs, of
    `texts` too. The longest first, since one may be part of another."""
    named, headers = list(named), list(headers)
    values = {value for name, value in named if _SECRET_NAME.search(name)} | set(headers)
    values |= {value.split(" ", 1)[1] for value in headers if " " in value}  # Bearer x
    for text in (*texts, *(value for _, value in named)):
        values |= _in_url(text)
    return sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True)


def _in_url(text: str) -> set[str]:
    try:
        parts = urlsplit(text)
    except ValueError:
        return set()
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    found = {password, unquote(password)}
    return found | {value for name, value in parse_qsl(parts.query) if _SECRET_NAME.search(name)}
