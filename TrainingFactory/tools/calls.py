"""Pending tool calls, the state that calls share, and the protocols of the result cache."""

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
_locked_states: ContextVar[tuple[ToolState, ...]] = ContextVar("locked states", default=())


class CallOutcome(NamedTuple):
    """Outcome of an attempt to execute a call. `is_answer_lost`: no answer arrived, so it is unknown whether the tool
    executed the call. `was_called`: the tool was called."""

    result: ToolResult
    is_answer_lost: bool = False
    was_called: bool = True


@dataclass(slots=True)
class PendingCall:
    """A call with valid arguments that has not been executed yet."""

    tool: Tool
    options: ToolOptions
    arguments: dict[str, Any]
    state: ToolState | None  # None: the call waits for no other calls
    timeout: float  # seconds for one attempt
    max_seconds: float  # for all attempts and the pauses between them
    max_output_chars: int
    # Executes the call before a `time.monotonic` deadline.
    execute: Callable[[PendingCall, float], Awaitable[CallOutcome]]
    episode: Hashable = None  # key of the episode, for the metrics

    @property
    def name(self) -> str:
        return self.tool.spec.name


class ToolState:
    """State shared by the tools of a server, or by the tools of this process. Calls that use it run one at a time, in
    call order."""

    def __init__(self, server_name: str) -> None:
        self.server_name = server_name
        self.is_stateful = False  # whether any of the tools is marked stateful
        self._lock = asyncio.Lock()
        self._skipped_calls: list[tuple[PendingCall, str]] = []

    @asynccontextmanager
    async def hold_lock(self) -> AsyncIterator[None]:
        """Lock the state for one call. The lock is reentrant, so a tool that calls other tools of its own state does
        not deadlock."""
        locked_states = _locked_states.get()
        if self in locked_states:
            yield
            return
        async with self._lock:
            token = _locked_states.set((*locked_states, self))
            try:
                yield
            finally:
                _locked_states.reset(token)

    def skip_call(self, call: PendingCall, content: str) -> None:
        """Record a call that the cache answered with `content`. The state does not reflect the call until
        `catch_up`."""
        self._skipped_calls.append((call, content))

    async def catch_up(self) -> None:
        """Execute the skipped calls in order, so that the state matches the conversation."""
        while self._skipped_calls:
            call, content = self._skipped_calls[0]
            result, is_answer_lost, _ = await call.execute(call, time.monotonic() + call.max_seconds)
            if is_answer_lost or result.error == "unavailable":
                raise ToolFailure(
                    f"{call.name} was answered from the cache, but executing it on {self.server_name or 'the tool'} "
                    f"afterwards failed: {result.content}"
                )
            del self._skipped_calls[0]
            if result.content != content:
                message = "%s is marked stateful, but equal calls gave different results; unmark it, or do not cache it"
                log.warning(message, call.name)


class EpisodeCache(Protocol):
    """Interface of the result cache for one episode."""

    async def obtain_result(self, call: PendingCall) -> ToolResult:
        """Return the cached result, or execute the call if it must not be cached or the cache has no result."""
        ...

    def fork(self) -> EpisodeCache:
        """Return a copy of the cache for an episode that continues this one."""
        ...


class ResultCache(Protocol):
    """A cache shared by all episodes of a run, such as `ToolCache`."""

    @property
    def num_failures(self) -> int: ...
    def episode(self, scope: str) -> EpisodeCache:
        """Open the cache for an episode. In-process stateful tools share results only within the same `scope`."""
        ...
