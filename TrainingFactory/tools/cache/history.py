"""What the cache knows a call by, and what one episode has done to a server whose answers depend on it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import NamedTuple

from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.limits import Gate
from TrainingFactory.tools.runtime import Outcome
from TrainingFactory.types import ToolFailure

log = logging.getLogger(__name__)
_inside: ContextVar[tuple[Group, ...]] = ContextVar("groups whose turn the running code has", default=())


class Skipped(NamedTuple):
    """A call that was answered from the cache, so that the server of this episode has not seen it."""

    tool: str
    content: str
    make: Callable[[], Awaitable[Outcome]]


class Group:
    """Tools of one executor that share state: those of a server, or those of this process that say so. Their calls
    run one after another, as the model wrote them.

    The history is a digest of the calls so far, in order. Two episodes with equal histories share cached results.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.stateful = False  # whether any of its tools is
        self._turn = Gate(1)
        self._history: str | None = digest("start", server)  # None: lost
        self._skipped: list[Skipped] = []

    def start(self, scope: str) -> None:
        """`scope` is what the state begins with. Servers begin alike for all; objects of this process, such as an
        environment, may have been made from a task."""
        self._history = digest("start", self.server, "" if self.server else scope)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """First come, first served. A tool that calls tools of its own group does not wait for itself."""
        outer = _inside.get()
        if self in outer:
            self.lose()
            yield
            return
        async with self._turn:
            token = _inside.set((*outer, self))
            try:
                yield
            finally:
                _inside.reset(token)

    def key(self, name: str | None) -> str | None:
        """The key of a call that comes next; None where it must not be cached."""
        return None if name is None or self._history is None else digest(self._history, name)

    def add(self, name: str | None) -> None:
        """The call was made, or answered from the cache."""
        self._history = self.key(name)

    def skip(self, call: Skipped) -> None:
        self._skipped.append(call)

    def lose(self) -> None:
        """Nobody knows what the server has done, so nothing is shared from here on."""
        self._history = None

    async def catch_up(self) -> None:
        """Make the calls that the cache has answered, in order, so that the server is where the model thinks."""
        while self._skipped:
            call = self._skipped[0]
            outcome = await call.make()
            if outcome.lost or outcome.result.error == "unavailable":
                raise ToolFailure(
                    f"{call.tool} was answered from the cache, and {self.server or 'its tool'} cannot be brought to "
                    f"that state: {outcome.result.content}"
                )
            del self._skipped[0]
            if outcome.result.content != call.content:
                log.warning(
                    "%s is marked stateful, but after equal calls it answered differently; the cache and training "
                    "on it are not reliable",
                    call.tool,
                )
