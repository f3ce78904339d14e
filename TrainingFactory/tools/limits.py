"""What keeps calls from overrunning a tool: so many at a time, so many a second, and none while its server is down.

All of it outlives an event loop: every batch of episodes runs in a loop of its own. It may also be used from several
loops at the same time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Clock = Callable[[], float]


class _Waiter:
    __slots__ = ("future", "granted", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.granted = False

    def wake(self) -> bool:
        """False where nobody waits any more."""
        with suppress(RuntimeError):  # no loop runs here
            if self.loop is asyncio.get_running_loop():
                if self.future.done():  # cancelled, and not yet taken out of the queue
                    return False
                self.future.set_result(None)
                return True
        try:
            self.loop.call_soon_threadsafe(_set, self.future)
        except RuntimeError:  # its loop is closed
            return False
        return True


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Gate:
    """Lets in `limit` at a time, first come, first served: `async with gate`."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: deque[_Waiter] = deque()
        # Reentrant: the garbage collector may close a coroutine, and so free a place, at any line of this class.
        self._lock = threading.RLock()

    @property
    def free(self) -> int:
        return self._free

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def acquire(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            waiter = _Waiter()
            self._waiting.append(waiter)
        try:
            await waiter.future
        except BaseException:  # cancelled: a place that was already given goes to the next
            with self._lock:
                if waiter.granted:
                    self.release()
                else:
                    with suppress(ValueError):
                        self._waiting.remove(waiter)
            raise

    def release(self) -> None:
        with self._lock:
            while self._waiting:
                waiter = self._waiting.popleft()
                if waiter.wake():
                    waiter.granted = True
                    return
            self._free += 1


class Pace:
    """At most `rate` a second, evenly spaced, first come, first served. Who gives up waiting uses up no slot."""

    def __init__(self, rate: float) -> None:
        self._gap = 1 / rate
        self._next = 0.0
        self._turn = Gate(1)

    async def wait(self) -> None:
        async with self._turn:
            pause = self._next - time.monotonic()
            if pause > 0:
                await asyncio.sleep(pause)
            self._next = max(time.monotonic(), self._next) + self._gap


class Limits:
    """The gate and the pace of one tool. A call that was given up at its time-out counts no longer, even where its
    thread still runs: else a few hung calls would lock everybody out."""

    def __init__(self, concurrency: int | None, rate: float | None) -> None:
        self._gate = Gate(concurrency) if concurrency is not None else None
        self._pace = Pace(rate) if rate is not None else None

    async def acquire(self) -> None:
        if self._gate is not None:
            await self._gate.acquire()
        if self._pace is not None:  # with the place in hand, so that no burst can build up before the gate
            try:
                await self._pace.wait()
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        if self._gate is not None:
            self._gate.release()


class CircuitBreaker:
    """Stops calls to a server that is down. `failures` in a row open it for `pause` seconds; then one call is let
    through as a probe: if that fails it stays open for twice as long (at most `longest`), a success closes it.

    Failures of calls that were under way together count as one: a server that dies takes all of them along, and may
    be back for the next.
    """

    def __init__(
        self, failures: int = 3, pause: float = 1.0, longest: float = 30.0, clock: Clock = time.monotonic
    ) -> None:
        self._limit, self._first_pause, self._longest, self._clock = failures, pause, longest, clock
        self._failures = 0
        self._incident = 0  # number of the last failure that counted
        self._pause = pause
        self._until: float | None = None  # None: closed
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether a call that came now would be turned away."""
        return self._until is not None and (self._probing or self._clock() < self._until)

    def allow(self) -> int | None:
        """None: the call must not be made. Else what is to be handed to `ended` after it."""
        if self.is_open:
            return None
        self._probing = self._until is not None
        return self._incident

    def ended(self, begun: int, answered: bool | None) -> None:
        """`answered`: the server did, be it with an error; None: the call was broken off, which says nothing."""
        if answered:
            self._failures, self._until, self._pause, self._probing = 0, None, self._first_pause, False
        elif begun == self._incident:  # else it failed together with others
            was_probe, self._probing = self._probing, False
            if answered is None:
                return
            self._incident += 1
            self._failures += 1
            if was_probe:
                self._pause = min(self._pause * 2, self._longest)
            if was_probe or self._failures >= self._limit:
                self._until = self._clock() + self._pause
