"""Episodes that say something, and what a rule gives them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kits.rollout import Echo
from TrainingFactory.rewards.rules.rule_based import make_rule_from_options
from TrainingFactory.rollout.scoring import OpenEpisode
from TrainingFactory.types import Completion, Message, Reward, Status, Task, ToolCall, Trajectory, Turn

_DATA = [root / "shared/data/gsm8k" for root in Path(__file__).resolve().parents]
GSM8K = next((path for path in _DATA if path.is_dir()), None)

# Options that a rule cannot do without.
NEEDED: dict[str, dict[str, Any]] = {
    "schema": {"schema": {"type": "integer"}},
    "format": {"require": ["marked_answer"]},
    "length": {"soft": 10, "hard": 20},
    "sql_result": {"tool": "echo"},
}


def turn(message: Message, *replies: Message) -> Turn:
    ids = list(range(10))
    return Turn([1], Completion(ids, [0.0] * len(ids), "stop"), message, list(replies))


def episode(
    text: str,
    answer: Any = "72",
    tools: Sequence[Any] = (),
    status: Status = "done",
    reasoning: str | None = None,
    before: tuple[Turn, ...] = (),
    environment: Any = Echo,
    **metadata: Any,
) -> OpenEpisode:
    task = Task("t1", "how many?", answer, metadata)
    last = turn(Message("assistant", text, reasoning=reasoning))
    made = environment(task, tools)
    trajectory = Trajectory(task, "g", turns=[*before, last], status=status)
    return OpenEpisode(trajectory, made, made.executor)


def reward(rule: Any, *args: Any, calls: Sequence[ToolCall] = (), **keywords: Any) -> Reward:
    """What a rule gives for an episode, whose environment has answered `calls` before."""
    made: Any = rule if callable(rule) else make_rule_from_options(rule)

    async def run() -> Any:
        played = episode(*args, **keywords)
        executor: Any = played.environment.executor  # type: ignore[attr-defined]
        try:
            await executor.batch_execute(calls)
            value = made(played)
            return await value if inspect.isawaitable(value) else value
        finally:
            await executor.close()

    value = asyncio.run(run())
    assert isinstance(value, Reward)
    return value


def scored(rule: Any, *args: Any, **keywords: Any) -> float:
    return reward(rule, *args, **keywords).outcome
