"""Limits on calls to a tool: concurrency, rate, and a circuit breaker for servers that are down."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TimeSource = Callable[[], float]


class CallLimits:
    """Admits at most `concurrency` calls at a time and `rate` calls per second, evenly spaced, in order of arrival.
    None: no limit. A caller that stops waiting uses no slot."""

    def __init__(self, concurrency: int | None, rate: float | None) -> None:
        self._concurrency = concurrency or sys.maxsize
        self._interval_seconds = None if rate is None else 1 / rate
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_start_at = 0.0

    @asynccontextmanager
    async def hold_slot(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it during the block."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # tools that outlive a run are used on several event loops
            self._loop, self._slots = loop, asyncio.Semaphore(self._concurrency)
            self._pacing_lock = asyncio.Lock()
        async with self._slots:
            if self._interval_seconds is not None:  # wait while holding the slot, so that no burst builds up
                async with self._pacing_lock:
                    await asyncio.sleep(max(0.0, self._next_start_at - time.monotonic()))
                    self._next_start_at = max(time.monotonic(), self._next_start_at) + self._interval_seconds
            yield


class CircuitBreaker:
    """Rejects calls to a server that is down. After `max_failures` consecutive failures it opens for `pause_seconds`,
    then admits one call as a probe; a failed probe doubles the pause. Failures of concurrent calls count as one."""

    def __init__(
        self,
        max_failures: int = 3,
        pause_seconds: float = 1.0,
        max_pause_seconds: float = 30.0,
        clock: TimeSource = time.monotonic,
    ) -> None:
        self._max_failures, self._clock = max_failures, clock
        self._first_pause_seconds, self._max_pause_seconds = pause_seconds, max_pause_seconds
        self._num_failures = 0  # consecutive
        self._num_incidents = 0  # failures counted so far
        self._pause_seconds = pause_seconds
        self._open_until: float | None = None  # None: closed
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """Return whether a call would be rejected now."""
        return self._open_until is not None and (self._is_probing or self._clock() < self._open_until)

    def admit_call(self) -> int | None:
        """Return a token to pass to `record_outcome` after the call; None if the call is rejected."""
        if self.is_open:
            return None
        self._is_probing = self._open_until is not None
        return self._num_incidents

    def record_outcome(self, token: int, has_answered: bool | None) -> None:
        """Count a call. `has_answered`: whether the server responded, even with an error; None: it was cancelled."""
        if has_answered:
            self._num_failures, self._pause_seconds = 0, self._first_pause_seconds
            self._open_until, self._is_probing = None, False
        elif token == self._num_incidents:  # otherwise a concurrent call has counted this failure already
            was_probe, self._is_probing = self._is_probing, False
            if has_answered is None:
                return
            self._num_incidents += 1
            self._num_failures += 1
            if was_probe:
                self._pause_seconds = min(self._pause_seconds * 2, self._max_pause_seconds)
            if was_probe or self._num_failures >= self._max_failures:
                self._open_until = self._clock() + self._pause_seconds
