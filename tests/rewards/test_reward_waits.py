"""Rewards that take long are told while they are waited for."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.kits.judge import episode
from TrainingFactory.training import reward_clock as waiting
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.types import Reward


def scored(clock: RewardClock, count: int) -> None:
    async def run() -> None:
        await asyncio.gather(*(clock(episode()) for _ in range(count)))  # type: ignore[arg-type]

    asyncio.run(run())


def test_rewards_that_are_waited_for_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "FIRST_REPORT_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "REPORT_EVERY_SECONDS", 0.02)
    said: list[str] = []

    async def slow(episode: object) -> Reward:
        async with asyncio.timeout(20):
            while len(said) < 2:
                await asyncio.sleep(0.01)
        return Reward(1.0)

    clock = RewardClock(slow, said.append)
    scored(clock, 3)
    assert all(re.search(r"3 rewards, the longest for \d+ s", text) for text in said)
    scored(clock, 3)  # at once, on another loop
    assert len(said) == 2 and clock.seconds > 0


def test_groups_count_their_members_and_quick_ones_are_not_told(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []

    async def whole(episodes: list[object]) -> list[float]:
        async with asyncio.timeout(20):
            while waits and not said:
                await asyncio.sleep(0.01)
        return [1.0 for _ in episodes]

    clock, waits = RewardClock(whole, said.append), False  # type: ignore[arg-type]
    asyncio.run(clock.group([episode(), episode()]))  # type: ignore[arg-type]
    assert not said
    monkeypatch.setattr(waiting, "FIRST_REPORT_SECONDS", 0.02)
    waits = True
    asyncio.run(clock.group([episode(), episode()]))  # type: ignore[arg-type]
    assert "2 rewards" in said[0]
