"""Episodes that say something, and what a rule gives them."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

from tests.kits.rollout import Echo
from TrainingFactory.rewards.rule_based import rule_from_options
from TrainingFactory.rollout.scoring import Episode
from TrainingFactory.types import Completion, Message, Reward, Status, Task, Trajectory, Turn

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
    status: Status = "done",
    reasoning: str | None = None,
    before: tuple[Turn, ...] = (),
    **metadata: Any,
) -> Episode:
    task = Task("t1", "how many?", answer, metadata)
    last = turn(Message("assistant", text, reasoning=reasoning))
    environment = Echo(task)
    trajectory = Trajectory(task, "g", turns=[*before, last], status=status)
    return Episode(trajectory, environment, environment.executor)


def reward(rule: Any, *args: Any, **keywords: Any) -> Reward:
    made: Any = rule if callable(rule) else rule_from_options(rule)
    value: Any = made(episode(*args, **keywords))
    if inspect.isawaitable(value):

        async def wait() -> Any:
            return await value

        value = asyncio.run(wait())
    assert isinstance(value, Reward)
    return value


def scored(rule: Any, *args: Any, **keywords: Any) -> float:
    return reward(rule, *args, **keywords).outcome
