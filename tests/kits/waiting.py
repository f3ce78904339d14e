"""Waiting for something that comes. The limits are guards against hangs, not measurements."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

HANG = 120.0  # seconds


def wait_until(condition: Callable[[], Any], seconds: float = HANG) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.02)


async def until(condition: Callable[[], Any], seconds: float = HANG) -> None:
    """The same on the running loop; the condition may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.02)
