"""Waiting for foreign code, but not for ever."""

from __future__ import annotations

import asyncio
import contextvars
import dis
import inspect
import time
from collections.abc import Coroutine
from functools import lru_cache
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")
GRACE_SECONDS = 1.0  # what a cancelled coroutine gets to clean up

_abandoned: set[asyncio.Task[Any]] = set()  # the loop itself keeps only weak references


class OutOfTime(Exception):
    """The limit was reached. Not a TimeoutError, which foreign code may raise on its own account."""


class SelfCancelled(Exception):
    """Foreign code raised CancelledError though nobody had cancelled it (dying connections do that)."""


class Clock:
    """Counts seconds, except while it is paused. Pause and resume it on the event loop of those who wait by it."""

    def __init__(self) -> None:
        self._paused_seconds = 0.0  # of all pauses that have ended
        self._paused_at = 0.0
        self._resumed: asyncio.Future[None] | None = None  # None while the clock runs

    def pause(self) -> None:
        if self._resumed is None:
            self._paused_at = time.monotonic()
            self._resumed = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        if self._resumed is not None:
            self._paused_seconds += time.monotonic() - self._paused_at
            self._resumed.set_result(None)
            self._resumed = None

    def now(self) -> float:
        return (time.monotonic() if self._resumed is None else self._paused_at) - self._paused_seconds

    def paused_for(self) -> float:
        """Return how many seconds the current pause has lasted; 0 while the clock runs."""
        return 0.0 if self._resumed is None else time.monotonic() - self._paused_at

    async def wait(self, task: asyncio.Task[Any], seconds: float) -> None:
        """Wait until the task is done, at most `seconds` of this clock."""
        end = self.now() + seconds
        while not task.done() and (left := end - self.now()) > 0:
            if self._resumed is None:
                await asyncio.wait({task}, timeout=left)
            else:
                await asyncio.wait({task, self._resumed}, return_when=asyncio.FIRST_COMPLETED)


async def within(seconds: float | None, coroutine: Coroutine[Any, Any, T], clock: Clock | None = None) -> T:
    """Return the coroutine's result; raise OutOfTime when it takes longer, by `clock` if one is given. Unlike
    `asyncio.timeout` this also comes back when the coroutine ignores its cancelling: it is then left behind."""
    task = asyncio.create_task(coroutine)
    try:
        if clock is None or seconds is None:
            await asyncio.wait({task}, timeout=seconds)
        else:
            await clock.wait(task, seconds)
        in_time = task.done()
    finally:
        if not task.done():
            await _stop(task)
    if not in_time:
        raise OutOfTime
    if task.cancelled():
        raise SelfCancelled("it cancelled itself")
    try:
        return task.result()
    finally:
        # Or what it raises would hold itself, with all that its frames hold, until garbage is collected.
        del task


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what `within` would of a coroutine that never waits, which no limit can stop: without a task."""
    try:
        contextvars.copy_context().run(coroutine.send, None)
    except StopIteration as ended:
        return ended.value
    except asyncio.CancelledError:
        raise SelfCancelled("it cancelled itself") from None
    raise AssertionError("a coroutine that never waits has waited")


@lru_cache(maxsize=1024)
def never_waits(code: CodeType) -> bool:
    """Tell whether this is the code of an async function that has no `await` in it."""
    waits = any(each.opname == "YIELD_VALUE" for each in dis.get_instructions(code))
    return bool(code.co_flags & inspect.CO_COROUTINE) and not waits


async def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    _abandoned.add(task)
    task.add_done_callback(_forget)
    await asyncio.wait({task}, timeout=GRACE_SECONDS)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that asyncio does not report it as lost
