"""Rewards that call tools, and episodes whose tools are down."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from tests.kits.rollout import call_text, rollout
from tests.kits.tools import Down
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Episode
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.tools import ToolRuntime, tool
from TrainingFactory.types import Reward, ToolFailure


class Checked(ToolEnvironment):
    """`verify` waits until all episodes of the batch are verifying."""

    running: ClassVar[int] = 0
    most: ClassVar[int] = 0
    all_here: ClassVar[asyncio.Event]

    @tool(timeout=20)
    async def verify(self, answer: str) -> str:
        cls = type(self)
        cls.running += 1
        cls.most = max(cls.most, cls.running)
        if cls.running == 6:
            cls.all_here.set()
        await asyncio.wait_for(cls.all_here.wait(), 15)
        cls.running -= 1
        return "right"

    @tool(timeout=0.05)
    async def slow(self) -> str:
        await asyncio.sleep(30)
        return ""

    @tool
    async def gone(self) -> str:
        raise ToolFailure("the server is gone")

    @tool
    async def broken(self) -> str:
        raise RuntimeError("a wrong query")

    @tool
    async def echo(self, text: str) -> str:
        return text


def test_rewards_call_tools_side_by_side() -> None:
    async def reward(episode: Episode) -> float:
        result = await episode.call("verify", answer=episode.trajectory.answer)
        return float(result.content == "right")

    Checked.running = Checked.most = 0
    Checked.all_here = asyncio.Event()
    runtime = ToolRuntime()
    groups = rollout(Checked, lambda *_: "ok", ("a", "b"), group_size=3, reward=reward, runtime=runtime)
    assert Checked.most == 6  # serial calls would wait for the others in vain
    assert all(played.reward == Reward(1.0) for group in groups for played in group)
    assert runtime.snapshot()["tools/verify/calls"] == 6


def test_a_verification_that_cannot_be_made_is_no_zero() -> None:
    async def reward(episode: Episode) -> float:
        name = {"a": "slow", "b": "gone", "c": "broken", "d": "echo"}[episode.task.id]
        result = await episode.call(name, **({"text": "x"} if name == "echo" else {}))
        return float(result.ok)

    groups = rollout(Checked, lambda *_: "ok", ("a", "b", "c", "d"), reward=reward, runtime=ToolRuntime())
    played = [trajectory for group in groups for trajectory in group]
    assert [t.reward for t in played] == [None, None, Reward(0.0), Reward(1.0)]
    assert "took longer" in str(played[0].error) and "the server is gone" in str(played[1].error)
    assert all(trajectory.status == "done" for trajectory in played)
    assert rollout_metrics(played)["episodes/unscored"] == 2


def test_an_episode_ends_where_a_server_is_down() -> None:
    [[played]] = rollout(Down, lambda *_: call_text("gone"))
    assert played.status == "tool_failure" and played.reward is None and played.error == "it is down"
    assert played.turns[0].tool_results[0].error == "unavailable"
