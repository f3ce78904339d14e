"""Run coroutines from any context, with or without a running event loop, and blocking functions on one thread."""

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
def treat_sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C inside the block: call the current SIGINT handler. Do nothing outside the main thread,
    because Python handles signals only there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: Any) -> None:
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):  # a shell script's background job
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    previous_handler = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous_handler is None else previous_handler)


def run(main: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None] | None = None) -> T:
    """Run a coroutine to completion. If an event loop is already running (as in a notebook), run it on a thread with
    its own loop, where Ctrl-C in the caller calls `interrupt`, or cancels the coroutine if `interrupt` is None.
    SIGTERM acts like Ctrl-C."""
    with treat_sigterm_as_ctrl_c():
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return _run_in_this_thread(main)
        return _run_in_thread(main, interrupt)


def _run_in_this_thread(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    results: list[T] = []

    async def store_result() -> None:
        # Not returned, because asyncio calls repr() on a finished task, and with it on its whole result.
        results.append(await main())

    asyncio.run(store_result())
    return results[0]


def _run_in_thread(main: Callable[[], Coroutine[Any, Any, T]], interrupt: Callable[[], None] | None) -> T:
    """Run a coroutine on a new thread with its own event loop, and block the caller until it ends."""
    outcome: Future[T] = Future()
    stop_callbacks: list[Callable[[], object]] = []

    async def run_main() -> T:
        loop, main_task = asyncio.get_running_loop(), asyncio.current_task()
        assert main_task is not None
        stop_callbacks.append(partial(loop.call_soon_threadsafe, interrupt or main_task.cancel))
        return await main()

    def run_on_thread() -> None:
        try:
            outcome.set_result(_run_in_this_thread(run_main))
        except asyncio.CancelledError:
            outcome.set_exception(KeyboardInterrupt())
        except BaseException as error:  # raised again in the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=run_on_thread, daemon=True, name="run").start()
    while not outcome.done():
        try:
            wait([outcome])
        except KeyboardInterrupt:
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                for stop in stop_callbacks:
                    stop()
    return outcome.result()


def explain_foreign_loop(error: BaseException) -> str:
    """Return a hint if the error's cause is an object of another event loop, else ""."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(phrase in str(cause) for cause in causes for phrase in ("different loop", "different event loop")):
        return (
            ". The object belongs to another event loop, such as a notebook's; train() uses its own. Start the run "
            "with `await trainer.train_async()`"
        )
    return ""


class OneThread:
    """Executor of blocking functions on one daemon thread, for which an interrupted program does not wait."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_jobs, daemon=True, name=name)
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the function on the thread and return its result. Cancelling the await does not stop the function."""
        return await call_in_thread(self._jobs.put, function, *args, **kwargs)

    def close(self) -> None:
        """End the thread after its queued jobs."""
        self._jobs.put(None)

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # otherwise its objects would stay alive until the next job


async def call_in_thread(
    submit: Callable[[Callable[[], None]], None], function: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Call the function on another thread, as a job that `submit` runs there, and return its result."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def run_job() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args, **kwargs)
        except BaseException as exception:  # even SystemExit must not end the thread without a result
            error = exception
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile, so nobody awaits the result
            loop.call_soon_threadsafe(lambda: outcome.done() or outcome.set_result((result, error)))

    submit(run_job)
    # The error is part of the value, because a future rejects StopIteration and would never complete.
    value, error = await outcome
    if error is not None:
        raise error
    return value
