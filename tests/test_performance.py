"""What makes training fast, by counts and never by times: what is under way at once, and what is not done again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.kits.run import Quiet
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.services import GRPOTrainer
from TrainingFactory.services.async_executor import AsyncRolloutEngine, AsyncToolExecutor
from TrainingFactory.services.reward_model import DistributedRewardModel
from TrainingFactory.tools import ToolCache, tool
from TrainingFactory.types import Message, Task, ToolCall, Trajectory


class Meeting:
    """Counts who is here at once; nobody leaves before `wanted` have come, so that only overlap comes to an end."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.here, self.most, self.all = wanted, 0, 0, 0
        self.met = asyncio.Event()

    async def meet(self) -> None:
        self.here += 1
        self.all += 1
        self.most = max(self.most, self.here)
        if self.here >= self.wanted:
            self.met.set()
        async with asyncio.timeout(60):  # a guard against hangs
            await self.met.wait()
        await asyncio.sleep(0)
        self.here -= 1


async def test_the_calls_of_a_turn_are_under_way_together() -> None:
    meeting = Meeting(8)

    @tool
    async def fetch(page: int) -> str:
        """Fetch a page."""
        await meeting.meet()
        return f"page {page}"

    calls = [ToolCall("fetch", {"page": number}) for number in range(8)]
    found = await AsyncToolExecutor([fetch]).batch_execute(calls)
    assert [result.content for result in found] == [f"page {number}" for number in range(8)]
    assert meeting.most == 8


async def test_workers_bound_the_episodes_at_once() -> None:
    """Twelve episodes, four at once: as many as there are workers, never more."""
    meeting = Meeting(4)

    class Slow(ToolEnvironment):
        async def reset(self) -> list[Message]:
            await meeting.meet()
            return await super().reset()

    engine = AsyncRolloutEngine(
        num_workers=4, model="builtin:tiny", environment=Slow, sampling={"max_tokens": 2}
    )
    found = await engine.rollout_batch([f"prompt {number}" for number in range(12)])
    await engine.close()
    assert [each.task.prompt for each in found] == [f"prompt {number}" for number in range(12)]
    assert meeting.all == 12 and meeting.most == 4


async def test_a_call_that_was_made_is_not_made_again() -> None:
    """Ten calls of two kinds, at the same time and after each other: two are made."""
    made: list[int] = []

    @tool(pure=True)
    async def fetch(page: int) -> str:
        """Fetch a page."""
        made.append(page)
        await asyncio.sleep(0)
        return f"page {page}"

    cache = ToolCache(tools=[fetch])
    calls = [ToolCall("fetch", {"page": number % 2}) for number in range(5)]
    together = await asyncio.gather(*map(cache.execute_with_cache, calls))
    later = [await cache.execute_with_cache(call) for call in calls]
    cache.close()
    assert [result.content for result in (*together, *later)] == [
        f"page {number % 2}" for number in (*range(5), *range(5))
    ]
    assert sorted(made) == [0, 1]


async def test_rewards_are_computed_together() -> None:
    meeting = Meeting(8)

    async def score(episode: Any) -> float:
        await meeting.meet()
        return float(episode.task.id)

    pool = DistributedRewardModel(model=score, num_workers=4)
    found = await pool.compute_rewards([Trajectory(Task(str(n), "?"), group="") for n in range(8)])
    assert [reward.outcome for reward in found] == [float(n) for n in range(8)] and meeting.most == 8


def test_a_run_asks_its_tools_once_for_all_members(tmp_path: Path) -> None:
    """The reward of every member of every group reads the same page; with the cache it is fetched once."""
    made: list[str] = []

    @tool(pure=True)
    def fetch(page: str) -> str:
        """Fetch a page."""
        made.append(page)
        return "text"

    class Reader(ToolEnvironment):
        @classmethod
        def tasks(cls, split: str, seed: int, count: int) -> list[Task]:
            return [Task("one", "Read.", "text"), Task("two", "Read.", "text")]

        async def reward(self, episode: Any) -> float:
            return float((await episode.call("fetch", page="home")).ok)

    options: dict[str, Any] = {
        "max_steps": 1,
        "batch_size": 2,
        "group_size": 4,
        "sampling": {"max_tokens": 2},
    }
    for cached, calls in ((True, 1), (False, 8)):
        made.clear()
        trainer = GRPOTrainer(
            environment=Reader,
            tools=[fetch],
            tool_cache=cached,
            output_dir=tmp_path / str(cached),
            watcher=Quiet(),
            **options,
        )
        trainer.train()
        assert len(made) == calls
