"""What a run hands to its tool runtime, a cache and a recorder, and what passes between them and the executor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from TrainingFactory.protocols import Tool
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult


class Outcome(NamedTuple):
    """`lost`: nobody knows whether the call was done, because no answer came. Worth another attempt. `made` is false
    where the tool was not reached at all."""

    result: ToolResult
    lost: bool = False
    made: bool = True


@dataclass(slots=True)
class PendingCall:
    """A call with good arguments that is not made yet."""

    tool: Tool
    options: ToolOptions
    arguments: dict[str, Any]
    state: SharedState | None  # None: it waits for no other calls
    seconds: float  # that it may take in all
    make: Callable[[float], Awaitable[Outcome]]  # until a time of `time.monotonic`


class SharedState(Protocol):
    """See `state.ToolState`."""

    @property
    def server(self) -> str: ...
    @property
    def stateful(self) -> bool: ...
    def skip(self, call: PendingCall, content: str) -> None:
        """Note a call that the cache has answered with `content`."""
        ...

    async def catch_up(self) -> None:
        """Make the calls that were skipped."""
        ...


class EpisodeCache(Protocol):
    """The cache as one episode sees it."""

    async def obtain(self, call: PendingCall) -> ToolResult:
        """Return the result of the call, from the cache where it may come from there, else by making it."""
        ...


class ResultCache(Protocol):
    """See `cache.cache.ToolCache`."""

    @property
    def failures(self) -> int: ...
    def episode(self, scope: str, max_output_chars: int) -> EpisodeCache:
        """Open the cache for an episode. `scope` is what tools of this process begin with."""
        ...


@dataclass(slots=True, frozen=True)
class Place:
    """Which call of a run it is: fixed by what the model did, whoever comes first."""

    key: Hashable  # of the episode, as it was given to `attach`
    # Of a turn: calls of `batch_execute` before this one, and the number in the batch. Of calls that a reward or
    # another tool makes, which may come in any order: who makes them, and what is called how many times before.
    batch: int | str
    index: int | str


class BrokenOff(Exception):
    """How a call ended that was cancelled: nobody got an answer."""


class CallRecorder(Protocol):
    """Records all calls of a run, also those that reach no tool, or answers all of them. See `recording.Recorder`."""

    def replay(self, place: Place, call: ToolCall, /) -> ToolResult | None:
        """Return the recorded result, None where nothing is replayed. Raise ToolFailure where the recorded call did,
        and for a call that was never recorded; BrokenOff where that was broken off."""
        ...

    def compare(
        self, place: Place, call: ToolCall, recorded: ToolResult, made: ToolResult | ToolFailure, /
    ) -> None:
        """Raise ToolFailure where a call that was made again in a replay has another result than the recorded one."""
        ...

    def record(self, place: Place, call: ToolCall, result: ToolResult | ToolFailure | BrokenOff, /) -> None:
        """Write down a call; `result` is what the model sees."""
        ...

    def check(self) -> None:
        """Raise ValueError where a replay has left its recording; whoever called the tool may have swallowed that."""
        ...
