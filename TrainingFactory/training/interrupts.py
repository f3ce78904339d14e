"""Graceful stop of a run by Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from TrainingFactory.common.event_loop import treat_sigterm_as_ctrl_c

T = TypeVar("T")
# Seconds within which signals count as one: `timeout` and some supervisors signal a process and then its whole group.
SAME_REQUEST_SECONDS = 0.5


class StopRequested(Exception):
    """Raised between two updates after the user requested a stop."""


class Interrupts:
    """Handles stop requests. The first request cancels sampling immediately and lets an update finish. A second request
    also cancels the update, and the run keeps its last checkpoint. Only the main thread gets signals; a run in another
    thread is stopped by `request_stop`."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.is_stop_requested = False
        self._notify, self._request_time = notify, 0.0
        self._failure: Exception | None = None
        self._run_task: asyncio.Task[Any] | None = None
        self._sampling_future: asyncio.Future[Any] | None = None  # the awaitable of `interruptible`

    @contextlib.contextmanager
    def watch_signals(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM while the block runs."""
        self._run_task = asyncio.current_task()
        try:
            with self._handle_signals():
                yield
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._run_task = None

    def fail(self, error: Exception) -> None:
        """Cancel the run and make it raise `error`, because a resource that the run needs is lost."""
        self._failure = error
        if self._run_task is not None:
            self._run_task.cancel()

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        previous_handler = signal.getsignal(signal.SIGINT)
        with contextlib.suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(signal.SIGINT, self.request_stop)
        try:
            with treat_sigterm_as_ctrl_c():
                yield
        finally:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, previous_handler)

    def request_stop(self) -> None:
        """Request a stop: cancel sampling, or stop after the running update. A second request cancels the run."""
        if self._failure is not None:
            return
        now, was_requested = time.monotonic(), self.is_stop_requested
        if was_requested and now - self._request_time < SAME_REQUEST_SECONDS:
            return
        self.is_stop_requested, self._request_time = True, now
        if was_requested and self._run_task is not None:
            self._run_task.cancel()
        elif self._sampling_future is not None:
            self._sampling_future.cancel()
        else:
            self._notify(
                "Stopping after this update; a second Ctrl-C or SIGTERM exits immediately, without a checkpoint"
            )

    def check(self) -> None:
        """Raise StopRequested if the user requested a stop."""
        if self.is_stop_requested:
            raise StopRequested

    async def interruptible(self, sampling: Awaitable[T]) -> T:
        """Await `sampling`, which a stop request may cancel at any moment. Raise StopRequested if a stop was
        requested."""
        future = asyncio.ensure_future(sampling)
        self._sampling_future = future
        try:
            self.check()
            return await future
        except (asyncio.CancelledError, StopRequested):
            if not future.done():
                future.cancel()
                await asyncio.gather(future, return_exceptions=True)
            if self.is_stop_requested:
                raise StopRequested from None
            raise
        finally:
            self._sampling_future = None

    async def pause(self, seconds: float) -> None:
        """Sleep for `seconds`, unless a stop is requested."""
        await self.interruptible(asyncio.sleep(seconds))

    async def iterate_until_stop(self, stream: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield the stream's items. A stop request may cancel the wait for an item at any moment."""
        while True:
            try:
                yield await self.interruptible(anext(stream))
            except StopAsyncIteration:
                return
