"""Blocking code beside the event loop: daemon threads that are reused and grow in number as needed. In asyncio's own
pool a few hung tools stop all others, and the interpreter waits for them at exit."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
IDLE_SECONDS = 60.0  # a thread without work for so long ends


class DaemonPool:
    """Every job has a thread at once: a waiting one, or a new one."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # One permit per thread that is about to take a job. Who adds a job takes a permit first, so no
        # job is ever queued behind a thread that hangs.
        self._waiting = threading.Semaphore(0)

    def submit(self, job: Callable[[], None]) -> None:
        if self._waiting.acquire(blocking=False):
            self._jobs.put(job)
        else:
            threading.Thread(target=self._work, args=(job,), daemon=True, name="tool").start()

    def _work(self, job: Callable[[], None]) -> None:
        while True:
            job()
            del job  # or what the job holds would live until the next one comes
            self._waiting.release()
            try:
                job = self._jobs.get(timeout=IDLE_SECONDS)
            except Empty:
                if self._waiting.acquire(blocking=False):
                    return
                job = self._jobs.get()  # the permit is taken: a job is on its way to this thread


_pool = DaemonPool()


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return the function's result, computed on a thread. A cancelled wait leaves the thread running."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((value, error))

    def job() -> None:
        value, error = None, None
        try:
            value = context.run(function, *args, **kwargs)
        except BaseException as caught:  # also SystemExit: it must not end this thread without an answer
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, nobody waits any more
            loop.call_soon_threadsafe(deliver, value, error)

    _pool.submit(job)
    # The error travels as a value: a future refuses StopIteration, and its wait would never end.
    value, error = await outcome
    if error is not None:
        raise error
    return value
