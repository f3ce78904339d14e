"""State that tools of one episode share, and the order in which their calls reach it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from TrainingFactory.tools.limits import PerLoop
from TrainingFactory.tools.protocols import PendingCall
from TrainingFactory.types import ToolFailure

log = logging.getLogger(__name__)
_inside: ContextVar[tuple[ToolState, ...]] = ContextVar("whose turn the running code has", default=())


class ToolState:
    """What the tools of a server share, or those of this process that say so. Their calls run one after another, as the
    model wrote them."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.stateful = False  # whether any of its tools is
        self._lock = PerLoop(asyncio.Lock)
        self._skipped: list[tuple[PendingCall, str]] = []

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the calls before. A tool that calls tools of its own state does not wait for itself."""
        outer = _inside.get()
        if self in outer:
            yield
            return
        async with self._lock.get():
            token = _inside.set((*outer, self))
            try:
                yield
            finally:
                _inside.reset(token)

    def skip(self, call: PendingCall, content: str) -> None:
        """Note a call that was answered without the tool, so that the state has not seen it."""
        self._skipped.append((call, content))

    async def catch_up(self) -> None:
        """Make the calls that were skipped, in order, so that the state is where the model thinks."""
        while self._skipped:
            call, content = self._skipped[0]
            name = call.tool.spec.name
            result, lost, _ = await call.make(time.monotonic() + call.seconds)
            if lost or result.error == "unavailable":
                raise ToolFailure(
                    f"{name} was answered from the cache, and {self.server or 'its tool'} cannot be brought to that "
                    f"state: {result.content}"
                )
            del self._skipped[0]
            if result.content != content:
                log.warning(
                    "%s is marked stateful, but after equal calls it answered differently; the cache and training "
                    "on it are not reliable",
                    name,
                )
