"""Says what is waited for. A judge that does not answer is asked again, which may take minutes in silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST, AGAIN = 10.0, 30.0  # seconds


class RewardsAwaited:
    """Rewards that are being computed, of one event loop at a time; those that take long are told."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[object, tuple[float, int]] = {}  # since when, and of how many episodes
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def one(self, episodes: int) -> Iterator[None]:
        """Around what scores so many episodes together."""
        this = object()
        self._open[this] = time.monotonic(), episodes
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FIRST, self._tell)
        try:
            yield
        finally:
            del self._open[this]
            if not self._open and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _tell(self) -> None:
        waited = time.monotonic() - min(since for since, _ in self._open.values())
        late = waited >= FIRST
        if late:
            count = sum(episodes for _, episodes in self._open.values())
            self._say(f"waiting for {count} reward{'s' * (count > 1)}, the longest for {waited:.0f} s so far")
        again = AGAIN if late else FIRST - waited
        self._timer = asyncio.get_running_loop().call_later(again, self._tell)
