"""What a server's entry may say under the key `tfactory`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

MAX_NAMES = 15
Isolation = Literal["shared", "session", "process"]


@dataclass(slots=True, frozen=True)
class ServerSettings:
    """Everything has a default: an entry without the key is a shared server that nothing is assumed about."""

    # shared: all episodes use the same connections. session, process: each episode has one of its own, which
    # is thrown away after it (over stdio both are a process of their own, over HTTP only session exists).
    isolation: Isolation = "shared"
    # shared: connections over which calls are spread. Otherwise: how many are started ahead of episodes.
    instances: int = 1
    max: int = 64  # own connections at the same time; more episodes wait, within their call's deadline
    timeout: float | None = None  # seconds for one call
    connect_timeout: float = 30.0  # seconds for start, handshake and list of tools
    concurrency: int | None = None  # calls of one tool at the same time
    rate: float | None = None  # calls of one tool per second
    # Of the server's tools: true (all of them), false, or a list of names. See `ToolOptions`.
    pure: bool | tuple[str, ...] = False
    stateful: bool | tuple[str, ...] = False
    idempotent: bool | tuple[str, ...] | None = None  # None: as the server's own hints say
    retries: int = 2
    tools: tuple[str, ...] | None = None  # the only ones to offer
    prefix: str | bool = False  # before the names of tools; true: the server's name and _
    error_text: str | None = None  # a regular expression; a text in which it is found is a failure

    def marked(self, option: str, tool: str) -> bool:
        """Whether `pure`, `stateful` or `idempotent` holds for a tool."""
        value = getattr(self, option)
        return bool(value) if not isinstance(value, tuple) else tool in value


_Check = tuple[Callable[[Any], bool], str]
_COUNT: _Check = (lambda v: type(v) is int and v >= 1, "a whole number of 1 or more")
_NUMBER: _Check = (lambda v: type(v) in (int, float) and v > 0, "a number over 0")
_NAMES: _Check = (
    lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
    "a list of names of tools",
)
_WHICH: _Check = (lambda v: isinstance(v, bool) or _NAMES[0](v), "true, false or a list of names of tools")
_CHECKS: dict[str, _Check] = {
    "isolation": (lambda v: v in ("shared", "session", "process"), '"shared", "session" or "process"'),
    "instances": _COUNT,
    "max": _COUNT,
    "timeout": _NUMBER,
    "connect_timeout": _NUMBER,
    "concurrency": _COUNT,
    "rate": _NUMBER,
    "pure": _WHICH,
    "stateful": _WHICH,
    "idempotent": _WHICH,
    "retries": (lambda v: type(v) is int and v >= 0, "a whole number of 0 or more"),
    "tools": _NAMES,
    "prefix": (lambda v: isinstance(v, str | bool), "a text, or true for the server's name"),
    "error_text": (lambda v: isinstance(v, str) and _compiles(v), "a regular expression"),
}


def read_settings(given: Any, where: str, over_http: bool) -> ServerSettings:
    """The settings, all checked; `where` names file and server in the errors."""
    if not isinstance(given, dict):
        raise ValueError(f'{where}: "tfactory" must be an object such as {{"isolation": "session"}}')
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _CHECKS:
            raise ValueError(f'{where}: "tfactory" has no option {key!r}{nearest(key, _CHECKS)}')
        fine, wanted = _CHECKS[key]
        if not fine(value):
            raise ValueError(f"{where}: tfactory.{key} must be {wanted}, not {value!r}")
        values[key] = tuple(value) if isinstance(value, list) else value
    settings = ServerSettings(**values)
    if settings.isolation == "process" and over_http:
        raise ValueError(
            f"{where}: an HTTP server's process is not ours to start; write isolation session, "
            "or give a command instead of a URL"
        )
    if settings.stateful and settings.isolation == "shared":
        raise ValueError(
            f"{where}: tools of a shared server see the calls of all episodes, so they cannot be stateful; "
            "write isolation session or process"
        )
    return settings


def nearest(name: str, known: Any) -> str:
    """'; did you mean X?', or what there is."""
    names = list(known)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    more = ", ..." if len(names) > MAX_NAMES else ""
    return f"; did you mean {found[0]!r}?" if found else f"; there are {', '.join(names[:MAX_NAMES])}{more}"


def _compiles(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True
