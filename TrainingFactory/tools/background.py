"""One event loop on a thread of its own, for what lives longer than a batch of episodes.

Every batch runs in its own `asyncio.run`, and a connection is bound to the loop it was opened on. So connections
live here, and calls hop over and back. Many calls at once share a wake-up, which is what a hop costs most.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
STOP_SECONDS = 5.0
# Seconds that an outcome waits for others on its way back, for every job that is under way: a few percent of what
# the jobs themselves take, and threads that change less often more than make up for it.
GATHER_SECONDS = 5e-5
LONGEST_GATHER = 0.005


class _Job:
    """One coroutine on its way over, and its outcome on the way back."""

    __slots__ = ("caller", "coroutine", "dropped", "error", "outcome", "task", "value")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], caller: asyncio.AbstractEventLoop) -> None:
        self.coroutine = coroutine
        self.caller = caller
        self.outcome: asyncio.Future[None] = caller.create_future()
        self.task: asyncio.Task[Any] | None = None
        self.dropped = False
        self.value: Any = None
        self.error: BaseException | None = None


class Background:
    """`hop` is for coroutines, `wait` for code without a loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._inbox: deque[_Job] = deque()
        self._woken = False
        self._outboxes: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        self._under_way = 0
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself keeps only weak references
        self._thread = threading.Thread(target=self._run, daemon=True, name="tool connections")
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    async def hop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, run over there. Cancelling this wait cancels the coroutine."""
        if self.loop.is_closed():
            coroutine.close()
            raise RuntimeError("the interpreter is ending, and connections with it")
        job = _Job(coroutine, asyncio.get_running_loop())
        self._inbox.append(job)
        if not self._woken:
            self._woken = True
            self._soon(self._take)
        try:
            await job.outcome
        except asyncio.CancelledError:
            self._soon(self._drop, job)
            raise
        # The error travels as a value: a future would refuse StopIteration, and take CancelledError as its own.
        if job.error is not None:
            raise job.error
        return job.value

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Blocks until it is done. Not for use on an event loop's thread."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()
            raise

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that nobody waits for; only for code that runs over there already."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _soon(self, function: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the interpreter is on its way out
            self.loop.call_soon_threadsafe(function, *args)

    def _take(self) -> None:
        self._woken = False  # first: what comes from now on wakes us again
        while self._inbox:
            job = self._inbox.popleft()
            if job.dropped:
                job.coroutine.close()
                continue
            self._under_way += 1
            job.task = self.loop.create_task(job.coroutine)
            job.task.add_done_callback(lambda task, job=job: self._done(job, task))

    def _drop(self, job: _Job) -> None:
        job.dropped = True
        if job.task is not None:
            job.task.cancel()

    def _done(self, job: _Job, task: asyncio.Task[Any]) -> None:
        job.task = None
        self._under_way -= 1
        if task.cancelled():
            job.error = asyncio.CancelledError()
        else:
            job.error = task.exception()
            job.value = None if job.error is not None else task.result()
        waiting = self._outboxes.setdefault(job.caller, [])
        if not waiting:  # what else ends meanwhile goes back with it
            delay = min(LONGEST_GATHER, GATHER_SECONDS * self._under_way)
            self.loop.call_later(delay, self._flush, job.caller)
        waiting.append(job)

    def _flush(self, caller: asyncio.AbstractEventLoop) -> None:
        jobs = self._outboxes.pop(caller)
        with contextlib.suppress(RuntimeError):  # that loop was closed meanwhile, nobody waits any more
            caller.call_soon_threadsafe(_deliver, jobs)

    def stop(self) -> None:
        self._soon(self.loop.stop)
        self._thread.join(STOP_SECONDS)


def _deliver(jobs: list[_Job]) -> None:
    for job in jobs:
        if not job.outcome.done():
            job.outcome.set_result(None)


_current: Background | None = None
_lock = threading.Lock()
_at_exit: list[Callable[[], None]] = []


def background() -> Background:
    """The one of this process, made when it is first asked for."""
    global _current
    with _lock:
        if _current is None:
            _current = Background()
        return _current


def before_exit(function: Callable[[], None]) -> None:
    """Called when the interpreter ends, while the loop still runs."""
    _at_exit.append(function)


@atexit.register
def _leave() -> None:
    if _current is None:
        return
    for function in _at_exit:
        with contextlib.suppress(Exception):  # nobody is left to hear of it
            function()
    _current.stop()


def _fresh() -> None:
    global _current, _lock
    _current, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_fresh)  # the thread does not survive a fork
