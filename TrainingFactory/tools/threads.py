"""An unbounded pool of reusable daemon threads for blocking code. In asyncio's own pool, a few hung tools block all
others, and the interpreter waits for them at exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from TrainingFactory.common.event_loop import call_in_thread

T = TypeVar("T")
_jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
# One permit per idle thread. Adding a job acquires a permit or starts a thread, so no job waits behind a hung one.
_idle_threads = threading.Semaphore(0)


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run the function on a thread and return its result. Cancelling the wait does not stop the thread."""
    return await call_in_thread(_start_job, function, *args, **kwargs)


def _start_job(job: Callable[[], None]) -> None:
    if not _idle_threads.acquire(blocking=False):
        threading.Thread(target=_run_jobs, daemon=True, name="tool").start()
    _jobs.put(job)


def _run_jobs() -> None:
    while True:
        job = _jobs.get()
        job()
        del job  # otherwise the objects it references stay alive until the next job
        _idle_threads.release()
