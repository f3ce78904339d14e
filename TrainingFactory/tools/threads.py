"""Blocking code beside the event loop, on daemon threads that are reused and grow in number as needed: in asyncio's own
pool a few hung tools stop all others, and the interpreter waits for them at exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from TrainingFactory.common.event_loop import hand_over

T = TypeVar("T")
_jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
# One permit per thread that is about to take a job. Who adds a job takes a permit first, so no job is ever queued
# behind a thread that hangs.
_waiting = threading.Semaphore(0)


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return the function's result, computed on a thread. A cancelled wait leaves the thread running."""
    return await hand_over(_start, function, *args, **kwargs)


def _start(job: Callable[[], None]) -> None:
    if not _waiting.acquire(blocking=False):
        threading.Thread(target=_work, daemon=True, name="tool").start()
    _jobs.put(job)


def _work() -> None:
    while True:
        job = _jobs.get()
        job()
        del job  # or what the job holds would live until the next one comes
        _waiting.release()
