"""Keeps calls from overrunning a tool: so many at a time, so many a second, and none while its server is down."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Clock = Callable[[], float]


class Limits:
    """Lets in `concurrency` calls at a time and `rate` a second, evenly spaced, first come, first served. Who gives up
    waiting uses up no slot."""

    def __init__(self, concurrency: int | None, rate: float | None) -> None:
        self._concurrency = concurrency or sys.maxsize
        self._gap = None if rate is None else 1 / rate
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = 0.0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and hold it."""
        if self._loop is not (loop := asyncio.get_running_loop()):  # who holds tools over two runs has two
            self._loop, self._places, self._turn = loop, asyncio.Semaphore(self._concurrency), asyncio.Lock()
        async with self._places:
            if self._gap is not None:  # with the place in hand, so that no burst can build up before it
                async with self._turn:
                    await asyncio.sleep(max(0.0, self._next - time.monotonic()))
                    self._next = max(time.monotonic(), self._next) + self._gap
            yield


class CircuitBreaker:
    """Stops calls to a server that is down: `failures` in a row open it for `pause` seconds; then one call is let in as
    a probe. Failures of calls that were under way together count as one."""

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
        """Tell whether a call that came now would be turned away."""
        return self._until is not None and (self._probing or self._clock() < self._until)

    def allow(self) -> int | None:
        """Return what is to be handed to `ended` after the call; None: it must not be made."""
        if self.is_open:
            return None
        self._probing = self._until is not None
        return self._incident

    def ended(self, begun: int, answered: bool | None) -> None:
        """Count a call, which the server `answered`, be it with an error; None: the call was broken off."""
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
