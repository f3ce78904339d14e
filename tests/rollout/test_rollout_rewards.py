from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.kits.rollout import Echo, rollout
from TrainingFactory.protocols import Episode
from TrainingFactory.types import Message, Reward, Step, Task, ToolFailure, Trajectory


def rewarded(reward: Any, **options: Any) -> Trajectory:
    [[played]] = rollout(reward=reward, **options)
    return played


def test_rewards_of_every_kind():
    async def later(episode: Episode) -> float:
        result = await episode.call("echo", text="checked")
        assert result.content == "checked" and episode.task.id == "a"
        missing = await episode.call("nothing")
        assert missing.error == "unknown"
        assert Echo.closed == {}  # the environment is still open
        return 0.25

    def blocking(episode: Episode) -> Reward:
        assert threading.current_thread() is not threading.main_thread()
        assert asyncio.run(asyncio.sleep(0, 5)) == 5  # a loop of its own is possible
        return Reward(0.5, [0.0, 0.0, 1.0], {"exact": 1.0})

    assert rewarded(later).reward == Reward(0.25)
    assert rewarded(blocking).reward == Reward(0.5, [0.0, 0.0, 1.0], {"exact": 1.0})
    assert rewarded(lambda episode: 1).reward == Reward(1.0)
    assert rewarded(lambda episode: later(episode)).reward == Reward(0.25)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "finite number"),
        (float("inf"), "finite number"),
        (Reward(0.0, [0.0, 0.0, float("nan")]), "finite number"),
        (Reward(0.0, [1.0]), "1 step rewards for 3 turns"),
        (None, "returned None"),
        ("0.5", "returned '0.5' (str)"),
        ([0.5], "returned [0.5] (list)"),
        (Reward("1"), "returned '1' (str)"),  # type: ignore[arg-type]
        (Reward(1.0, parts={"a": float("nan")}), "finite number"),
        (ZeroDivisionError("x"), "ZeroDivisionError: x"),
        (SystemExit(), "tried to end the program"),
        (ToolFailure("gone"), "): gone"),
        (asyncio.CancelledError(), "cancelled itself"),
    ],
)
def test_what_cannot_be_scored_is_never_a_zero(value: Any, says: str):
    def reward(episode: Episode) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    async def on_loop(episode: Episode) -> Any:
        return reward(episode)

    for function in (reward, on_loop):
        played = rewarded(function)
        assert played.status == "done" and played.reward is None
        assert str(played.error).startswith("scoring failed: ") and says in str(played.error)
        assert Echo.closed == {"a": 1}


def test_a_reward_that_hangs():
    let_go = threading.Event()
    try:
        played = rewarded(lambda episode: let_go.wait(30), episode_timeout=1)
    finally:
        let_go.set()
    assert played.reward is None and played.error == "scoring took longer than 1 s"


def test_an_environment_without_a_reward():
    class Bare:
        """Only what the protocol asks for."""

        def __init__(self, task: Task) -> None:
            self.task = task
            self.tools = Echo(task).tools

        async def reset(self) -> list[Message]:
            return [Message("user", "hi")]

        async def step(self, message: Message) -> Step:
            return Step(done=True, signals={"polite": 1.0})

        async def close(self) -> None: ...

    async def by_call(episode: Episode) -> float:
        return float((await episode.call("echo", text="1")).content)

    [[played]] = rollout(Bare)
    assert played.reward is None and "no `reward` method" in str(played.error)
    assert played.turns[0].signals == {"polite": 1.0}
    assert rewarded(by_call, environment=Bare).reward == Reward(1.0)
