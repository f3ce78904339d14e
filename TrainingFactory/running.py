"""Run asynchronous code from anywhere, and blocking code beside it.

A run is one asynchronous program on one event loop. `run` starts it from a script, from a notebook, or from inside any
other running loop; `OneThread` keeps blocking work (updates of the weights) off the loop, always on the same thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None] | None = None) -> T:
    """Run a coroutine to its end and return its result.

    Without a running loop it runs here. Inside one, as in a notebook, it runs on a thread with a loop of its own;
    Ctrl-C in the caller then calls `interrupt` on that loop, or cancels the coroutine where none is given."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(main)
    return _Beside(main, interrupt).join()


def _run_here(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    found: list[T] = []

    async def keep() -> None:
        # Not returned: asyncio makes a text of a finished task, and with it of everything in its result.
        found.append(await main())

    asyncio.run(keep())
    return found[0]


def other_loop(error: BaseException) -> str:
    """Return what to add to the text of an error that comes from an object of another event loop; else nothing."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(text in str(each) for each in causes for text in ("different loop", "different event loop")):
        return (
            ". It belongs to another event loop, such as a notebook's, and a run that is started there by train() has "
            "one of its own: start it by `await trainer.train_async()`"
        )
    return ""


class _Beside:
    """A coroutine on a thread of its own, beside a loop that is blocked meanwhile."""

    def __init__(
        self, main: Callable[[], Coroutine[Any, Any, Any]], interrupt: Callable[[], None] | None
    ) -> None:
        self._main, self._interrupt = main, interrupt
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = threading.Event()  # Thread.join, interrupted, takes a living thread for an ended one

    def join(self) -> Any:
        threading.Thread(target=self._work, daemon=True, name="run").start()
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except KeyboardInterrupt:
                self._stop()
        if self._error is not None:
            raise self._error
        return self._value

    def _work(self) -> None:
        try:
            self._value = _run_here(self._noted)
        except asyncio.CancelledError:
            self._error = KeyboardInterrupt()
        except BaseException as error:  # it belongs to the caller's thread
            self._error = error
        finally:
            self._ended.set()

    async def _noted(self) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await self._main()

    def _stop(self) -> None:
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._interrupt or self._task.cancel)


class OneThread:
    """Run blocking functions on one fixed daemon thread, one after the other.

    A daemon: a program that is told to stop at once does not wait for an update to end."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=name)
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return what the function returns. A cancelled wait leaves it running."""
        return await hand_over(self._jobs.put, function, *args, **kwargs)

    def close(self) -> None:
        """End the thread after what it has been given."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # or what it holds would live until the next one comes


async def hand_over(
    start: Callable[[Callable[[], None]], None], function: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Return what the function returns, called by a job that `start` hands to another thread."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def job() -> None:
        value, error = None, None
        try:
            value = context.run(function, *args, **kwargs)
        except BaseException as caught:  # also SystemExit: it must not end the thread without an answer
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, nobody waits any more
            loop.call_soon_threadsafe(lambda: outcome.done() or outcome.set_result((value, error)))

    start(job)
    # The error travels as a value: a future refuses StopIteration, and its wait would never end.
    value, error = await outcome
    if error is not None:
        raise error
    return value
