"""Run asynchronous code from anywhere, and blocking code beside it on one thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C while the block runs: the handler of SIGINT, whichever it is, gets it. On threads other
    than the main one, where Python takes no signals, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):  # a shell script's background job
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def run(main: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None] | None = None) -> T:
    """Run a coroutine to its end: here, or inside a running loop, as in a notebook's, on a thread with a loop of its
    own. There Ctrl-C in the caller calls `interrupt` on that loop, or cancels the coroutine where none is given.
    SIGTERM does what Ctrl-C does."""
    with sigterm_as_ctrl_c():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return _run_here(main)
        return _run_beside(main, interrupt)


def _run_here(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    found: list[T] = []

    async def keep() -> None:
        # Not returned: asyncio makes a text of a finished task, and with it of everything in its result.
        found.append(await main())

    asyncio.run(keep())
    return found[0]


def _run_beside(main: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None] | None) -> T:
    """Run a coroutine on a thread of its own, beside a loop that is blocked meanwhile."""
    outcome: Future[T] = Future()
    stops: list[Callable[[], object]] = []

    async def noted() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stops.append(partial(loop.call_soon_threadsafe, interrupt or task.cancel))
        return await main()

    def work() -> None:
        try:
            outcome.set_result(_run_here(noted))
        except asyncio.CancelledError:
            outcome.set_exception(KeyboardInterrupt())
        except BaseException as error:  # it belongs to the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True, name="run").start()
    while not outcome.done():
        try:
            wait([outcome])
        except KeyboardInterrupt:
            with contextlib.suppress(RuntimeError):  # it has just ended
                for stop in stops:
                    stop()
    return outcome.result()


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


class OneThread:
    """Run blocking functions on one fixed daemon thread: a program that stops at once does not wait for an update."""

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
