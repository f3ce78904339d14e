"""Stop a run by Ctrl-C or SIGTERM without losing what it learned."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from TrainingFactory.common.event_loop import sigterm_as_ctrl_c

T = TypeVar("T")
# `timeout` and some supervisors signal a process and then its whole group: signals within these seconds are one.
SAME_REQUEST = 0.5


class Stopped(Exception):
    """The user asked to stop, and nothing is half done."""


class Interrupts:
    """Cancel sampling immediately and let an update finish. A second Ctrl-C or SIGTERM cancels that too, and the run
    keeps its last checkpoint. Signals arrive on the main thread; on other threads the owner of the run calls `ask`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = False
        self._say, self._since = say, 0.0
        self._failure: Exception | None = None
        self._whole: asyncio.Task[Any] | None = None  # the run
        self._sampling: asyncio.Future[Any] | None = None  # what may be cancelled at any moment

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Take Ctrl-C and SIGTERM while the block runs."""
        self._whole = asyncio.current_task()
        try:
            with self._signals():
                yield
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._whole = None

    def fail(self, error: Exception) -> None:
        """End whatever is under way with this error: what the run needs is gone."""
        self._failure = error
        if self._whole is not None:
            self._whole.cancel()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = signal.getsignal(signal.SIGINT)
        with contextlib.suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(signal.SIGINT, self.ask)
        try:
            with sigterm_as_ctrl_c():
                yield
        finally:
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)

    def ask(self) -> None:
        """Cancel sampling, or stop after the update that is running; the second time cancel the run."""
        if self._failure is not None:
            return
        now, again = time.monotonic(), self.asked
        if again and now - self._since < SAME_REQUEST:
            return
        self.asked, self._since = True, now
        if again and self._whole is not None:
            self._whole.cancel()
        elif self._sampling is not None:
            self._sampling.cancel()
        else:
            self._say(
                "stopping after this update; a second Ctrl-C or SIGTERM exits immediately, without a checkpoint"
            )

    def check(self) -> None:
        """Raise Stopped if that was asked for."""
        if self.asked:
            raise Stopped

    async def at_once(self, sampling: Awaitable[T]) -> T:
        """Await what may be cancelled at any moment; raise Stopped where it was."""
        future = asyncio.ensure_future(sampling)
        self._sampling = future
        try:
            self.check()
            return await future
        except (asyncio.CancelledError, Stopped):
            if not future.done():
                future.cancel()
                await asyncio.gather(future, return_exceptions=True)
            if self.asked:
                raise Stopped from None
            raise
        finally:
            self._sampling = None

    async def pause(self, seconds: float) -> None:
        """Sleep until the time is over or Ctrl-C comes."""
        await self.at_once(asyncio.sleep(seconds))

    async def over(self, stream: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield what the stream gives, each of it awaited by `at_once`."""
        while True:
            try:
                yield await self.at_once(anext(stream))
            except StopAsyncIteration:
                return
