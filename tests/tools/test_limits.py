"""Limits and circuit breakers by themselves."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from TrainingFactory.tools import limits as limits_module
from TrainingFactory.tools.limits import CallLimits, CircuitBreaker


@settings(max_examples=25, deadline=None)
@given(
    limit=st.integers(1, 4),
    visits=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=15),
)
def test_limits_never_let_in_too_many_and_lose_no_place(limit: int, visits: list[tuple[int, bool]]):
    """Some visitors are cancelled while they wait or while they are inside; and a second run has another loop."""
    limits = CallLimits(limit, None)
    inside, most, order = 0, 0, list[int]()

    async def visit(number: int, rounds: int) -> None:
        nonlocal inside, most
        async with limits.hold_slot():
            order.append(number)
            inside += 1
            most = max(most, inside)
            try:
                for _ in range(rounds):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    async def main() -> None:
        tasks = [asyncio.create_task(visit(number, rounds)) for number, (rounds, _) in enumerate(visits)]
        for task, (rounds, cancelled) in zip(tasks, visits, strict=True):
            if cancelled:
                for _ in range(rounds):
                    await asyncio.sleep(0)
                task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert ended is None or isinstance(ended, asyncio.CancelledError)
        async with asyncio.timeout(10), contextlib.AsyncExitStack() as held:
            for _ in range(limit):  # all places are free again
                await held.enter_async_context(limits.hold_slot())
        assert order == sorted(order)  # first come, first served

    for _ in range(2):
        order.clear()
        asyncio.run(main())
    assert most <= limit and inside == 0


async def test_a_rate_spaces_calls_and_who_gives_up_uses_no_slot(monkeypatch: pytest.MonkeyPatch):
    now, wait = 0.0, asyncio.sleep

    async def sleep(seconds: float) -> None:
        nonlocal now
        await wait(0)
        now += seconds

    monkeypatch.setattr(limits_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(limits_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    limits = CallLimits(None, 10.0)

    async def visit() -> float:
        async with limits.hold_slot():
            return now

    waiting = [asyncio.create_task(visit()) for _ in range(1000)]
    await wait(0)
    for task in waiting[1:]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    starts = [waiting[0].result()] + [await visit() for _ in range(4)]
    assert starts == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])  # the slots of those who left would take 100 s


def test_a_breaker():
    now = 0.0
    breaker = CircuitBreaker(max_failures=3, pause_seconds=1.0, max_pause_seconds=3.0, clock=lambda: now)

    def call(answered: bool | None) -> bool:
        begun = breaker.admit_call()
        if begun is not None:
            breaker.record_outcome(begun, answered)
        return begun is not None

    assert call(False) and call(False) and call(True) and call(False) and call(False)
    assert not breaker.is_open  # never three in a row
    assert call(False) and breaker.is_open and not call(True)
    now = 1.0
    probe = breaker.admit_call()
    assert probe is not None and breaker.admit_call() is None  # one probe at a time
    breaker.record_outcome(probe, None)  # the probe was broken off: that says nothing
    assert call(False) and not call(True)  # a failed probe: twice as long
    now = 2.5
    assert not call(True)
    now = 3.0
    assert call(False)
    now = 5.9
    assert not call(True)
    now = 6.1  # never longer than 3
    assert call(True) and not breaker.is_open and call(True)
    assert call(False) and call(False) and not breaker.is_open


def test_calls_that_fail_together_count_as_one_failure():
    breaker = CircuitBreaker(max_failures=2, clock=lambda: 0.0)
    together = [breaker.admit_call() for _ in range(64)]
    for begun in together:
        assert begun is not None
        breaker.record_outcome(begun, False)
    assert not breaker.is_open
    begun = breaker.admit_call()
    assert begun is not None
    breaker.record_outcome(begun, False)
    assert breaker.is_open
