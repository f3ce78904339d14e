"""A call on its way: what it needs, the state that it shares with other calls, and the cache that may answer it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from TrainingFactory.protocols import Tool
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import ToolFailure, ToolResult

log = logging.getLogger(__name__)
_inside: ContextVar[tuple[ToolState, ...]] = ContextVar("whose turn the running code has", default=())


class Outcome(NamedTuple):
    """`lost`: no answer came, so that nobody knows whether the call was done. `made`: the tool was reached at all."""

    result: ToolResult
    lost: bool = False
    made: bool = True


@dataclass(slots=True)
class PendingCall:
    """A call with good arguments that is not made yet."""

    tool: Tool
    options: ToolOptions
    arguments: dict[str, Any]
    state: ToolState | None  # None: it waits for no other calls
    timeout: float  # seconds for one attempt
    seconds: float  # for all attempts and everything between them
    max_output_chars: int
    make: Callable[[PendingCall, float], Awaitable[Outcome]]  # until a time of `time.monotonic`
    episode: Hashable = None  # whose call it is, for the metrics

    @property
    def name(self) -> str:
        return self.tool.spec.name


class ToolState:
    """State that tools of a server or of this process share: their calls run one after another, as written."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.stateful = False  # whether any of its tools is
        self._lock = asyncio.Lock()
        self._skipped: list[tuple[PendingCall, str]] = []

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the calls before. A tool that calls tools of its own state does not wait for itself."""
        outer = _inside.get()
        if self in outer:
            yield
            return
        async with self._lock:
            token = _inside.set((*outer, self))
            try:
                yield
            finally:
                _inside.reset(token)

    def skip(self, call: PendingCall, content: str) -> None:
        """Note a call that was answered with `content` from the cache, so that the state has not seen it."""
        self._skipped.append((call, content))

    async def catch_up(self) -> None:
        """Make the calls that were skipped, in order, so that the state is where the model thinks."""
        while self._skipped:
            call, content = self._skipped[0]
            result, lost, _ = await call.make(call, time.monotonic() + call.seconds)
            if lost or result.error == "unavailable":
                raise ToolFailure(
                    f"{call.name} was answered from the cache, and {self.server or 'its tool'} cannot be brought to "
                    f"that state: {result.content}"
                )
            del self._skipped[0]
            if result.content != content:
                log.warning(
                    "%s is marked stateful, but after equal calls it answered differently; the cache and training "
                    "on it are not reliable",
                    call.name,
                )


class EpisodeCache(Protocol):
    """The cache as one episode sees it."""

    async def obtain(self, call: PendingCall) -> ToolResult:
        """Return the result of the call, from the cache where it may come from there, else by making it."""
        ...


class ResultCache(Protocol):
    """A cache for all episodes of a run, such as `ToolCache`."""

    @property
    def failures(self) -> int: ...
    def episode(self, scope: str) -> EpisodeCache:
        """Open the cache for an episode. `scope` is what tools of this process begin with."""
        ...
