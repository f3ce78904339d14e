"""Options of a server: what its entry may say under the key `tfactory`."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from TrainingFactory.options import STRICT, Count, Positive, ZeroOrMore

Isolation = Literal["shared", "session", "process"]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class ServerSettings:
    """Everything has a default: an entry without the key is a shared server that nothing is assumed about."""

    # shared: all episodes use the same connections. session, process: each episode has one of its own, which
    # is thrown away after it (over stdio both are a process of their own, over HTTP only session exists).
    isolation: Isolation = "shared"
    # shared: connections over which calls are spread. Otherwise: how many are started ahead of episodes.
    instances: Count = 1
    max: Count = 64  # own connections at the same time; more episodes wait, within their call's deadline
    timeout: Positive | None = None  # seconds for one call
    connect_timeout: Positive = 30.0  # seconds for start, handshake and list of tools
    concurrency: Count | None = None  # calls of one tool at the same time
    rate: Positive | None = None  # calls of one tool per second
    # Of the server's tools: true (all of them), false, or a list of names. See `ToolOptions`.
    pure: bool | list[str] = False
    stateful: bool | list[str] = False
    idempotent: bool | list[str] | None = None  # None: as the server's own hints say
    retries: ZeroOrMore = 2
    tools: list[str] | None = None  # the only ones to offer
    prefix: str | bool = False  # before the names of tools; true: the server's name and _
    error_text: re.Pattern[str] | None = None  # a text in which it is found is a failure

    @model_validator(mode="after")
    def _check_stateful(self) -> Self:
        if self.stateful and self.isolation == "shared":
            raise ValueError(
                "tools of a shared server see the calls of all episodes, so they cannot be stateful; "
                "write isolation session or process"
            )
        return self

    @property
    def named(self) -> list[str]:
        """Return every name of a tool that stands in a list here."""
        lists = (self.tools, self.pure, self.stateful, self.idempotent)
        return [name for names in lists if isinstance(names, list) for name in names]


def marked(option: bool | list[str], tool: str) -> bool:
    """Return whether an option such as `pure` holds for the tool."""
    return tool in option if isinstance(option, list) else option
