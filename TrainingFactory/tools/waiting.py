"""Waiting for foreign code, but not for ever."""

from __future__ import annotations

import asyncio
import contextvars
import dis
import inspect
from collections.abc import Coroutine
from functools import lru_cache
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")
GRACE_SECONDS = 1.0  # what a cancelled coroutine gets to clean up

_abandoned: set[asyncio.Task[Any]] = set()  # the loop itself keeps only weak references


class OutOfTime(Exception):
    """The limit was reached. Not a TimeoutError, which foreign code may raise on its own account."""


class SelfCancelled(Exception):
    """Foreign code raised CancelledError though nobody had cancelled it (dying connections do that)."""


async def within(seconds: float | None, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the coroutine's result; raise OutOfTime when it takes longer. Unlike `asyncio.timeout` this also comes
    back when the coroutine ignores its cancelling: it is then left behind."""
    task = asyncio.create_task(coroutine)
    try:
        await asyncio.wait({task}, timeout=seconds)
        in_time = task.done()
    finally:
        if not task.done():
            await _stop(task)
    if not in_time:
        raise OutOfTime
    if task.cancelled():
        raise SelfCancelled("it cancelled itself")
    try:
        return task.result()
    finally:
        # Or what it raises would hold itself, with all that its frames hold, until garbage is collected.
        del task


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what `within` would of a coroutine that never waits, which no limit can stop: without a task."""
    try:
        contextvars.copy_context().run(coroutine.send, None)
    except StopIteration as ended:
        return ended.value
    except asyncio.CancelledError:
        raise SelfCancelled("it cancelled itself") from None
    raise AssertionError("a coroutine that never waits has waited")


@lru_cache(maxsize=1024)
def never_waits(code: CodeType) -> bool:
    """Tell whether this is the code of an async function that has no `await` in it."""
    waits = any(each.opname == "YIELD_VALUE" for each in dis.get_instructions(code))
    return bool(code.co_flags & inspect.CO_COROUTINE) and not waits


async def _stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    _abandoned.add(task)
    task.add_done_callback(_forget)
    await asyncio.wait({task}, timeout=GRACE_SECONDS)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # looked at, so that asyncio does not report it as lost
