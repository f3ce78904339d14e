"""Time-outs for foreign code, which may ignore cancellation."""

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
GRACE_SECONDS = 1.0  # for a cancelled coroutine to clean up

_abandoned_tasks: set[asyncio.Task[Any]] = set()  # strong references: the event loop keeps only weak ones


class OutOfTime(Exception):
    """Raised when the time limit is reached. It is not a TimeoutError, because foreign code may raise that itself."""


class SelfCancelled(Exception):
    """Raised if foreign code raised CancelledError without having been cancelled, as broken connections do."""


class PausableClock:
    """A clock that can be paused. Pause and resume it on the event loop of the coroutines that wait for it."""

    def __init__(self) -> None:
        self._paused_seconds = 0.0  # total of all finished pauses
        self._paused_at = 0.0
        self._resumed_future: asyncio.Future[None] | None = None  # None while the clock runs

    def pause(self) -> None:
        if self._resumed_future is None:
            self._paused_at = time.monotonic()
            self._resumed_future = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        if self._resumed_future is not None:
            self._paused_seconds += time.monotonic() - self._paused_at
            self._resumed_future.set_result(None)
            self._resumed_future = None

    def now(self) -> float:
        return (time.monotonic() if self._resumed_future is None else self._paused_at) - self._paused_seconds

    def get_pause_seconds(self) -> float:
        """Return the seconds since the current pause began; 0 while the clock runs."""
        return 0.0 if self._resumed_future is None else time.monotonic() - self._paused_at

    async def wait(self, task: asyncio.Task[Any], seconds: float) -> None:
        """Wait until the task is done, for at most `seconds` on this clock."""
        deadline = self.now() + seconds
        while not task.done() and (remaining_seconds := deadline - self.now()) > 0:
            if self._resumed_future is None:
                await asyncio.wait({task}, timeout=remaining_seconds)
            else:
                await asyncio.wait({task, self._resumed_future}, return_when=asyncio.FIRST_COMPLETED)


async def run_within(
    seconds: float | None, coroutine: Coroutine[Any, Any, T], clock: PausableClock | None = None
) -> T:
    """Return the coroutine's result; raise OutOfTime after `seconds` (None: no limit), measured by `clock` if one is
    passed. Unlike `asyncio.timeout`, this also returns if the coroutine ignores its cancellation; it is abandoned."""
    task = asyncio.create_task(coroutine)
    try:
        if clock is None or seconds is None:
            await asyncio.wait({task}, timeout=seconds)
        else:
            await clock.wait(task, seconds)
        is_done = task.done()
    finally:
        if not task.done():
            await _stop_task(task)
    if not is_done:
        raise OutOfTime
    if task.cancelled():
        raise SelfCancelled("it cancelled itself")
    try:
        return task.result()
    finally:
        # Breaks a reference cycle: an exception holds this frame, which holds the task, which holds the exception.
        del task


def run_inline(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits. It runs without a task, because no time-out could stop it. If
    it raises CancelledError, raise SelfCancelled, as `run_within` does."""
    try:
        contextvars.copy_context().run(coroutine.send, None)
    except StopIteration as stop_iteration:
        return stop_iteration.value
    except asyncio.CancelledError:
        raise SelfCancelled("it cancelled itself") from None
    raise AssertionError("the coroutine waited although its code has no await")


@lru_cache(maxsize=1024)
def never_waits(code: CodeType) -> bool:
    """Return whether this is the code of an async function without `await`."""
    has_yield = any(instruction.opname == "YIELD_VALUE" for instruction in dis.get_instructions(code))
    return bool(code.co_flags & inspect.CO_COROUTINE) and not has_yield


async def _stop_task(task: asyncio.Task[Any]) -> None:
    task.cancel()
    _abandoned_tasks.add(task)
    task.add_done_callback(_forget_task)
    await asyncio.wait({task}, timeout=GRACE_SECONDS)


def _forget_task(task: asyncio.Task[Any]) -> None:
    _abandoned_tasks.discard(task)
    if not task.cancelled():
        task.exception()  # mark it as retrieved, otherwise asyncio logs a warning
