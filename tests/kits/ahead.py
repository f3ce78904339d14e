"""A source that samples ahead, over episodes of a script: the test says which group ends when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from TrainingFactory.training.async_rollout import AsyncSource
from TrainingFactory.training.ledger import Ledger
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.training.source import StepGroups
from TrainingFactory.training.task_order import TaskOrder
from TrainingFactory.types import Completion, Message, Reward, Sample, Task, Trajectory, Turn


@dataclass
class Teaching:
    """An algorithm that learns from every task but the dull ones."""

    dull: set[str] = field(default_factory=set)
    refill: int = 0

    def adjusted(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        return list(group)

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        return [] if group[0].task.id in self.dull else [Sample([1], [True], [0.0], [1.0], [0.0], [0])]


@dataclass
class Scripted:
    """Rollouts and sampler in one: a group has a turn of the version it begins with and one of that it ends with."""

    slow: dict[str, asyncio.Event] = field(default_factory=dict)  # by the group's name
    fails: dict[str, Exception] = field(default_factory=dict)
    policy_version: int = 0
    begun: list[str] = field(default_factory=list)
    running: int = 0
    chance: random.Random | None = None
    branching: None = None
    dropped_forks: int = 0

    async def rollout_batch(
        self, tasks: Sequence[Task], sampler: Any, group_size: int, step: int, *, group_names: Sequence[str]
    ) -> list[list[Trajectory]]:
        [task], [name] = tasks, group_names
        self.begun.append(f"{step}/{name}")
        self.running += 1
        first = self.policy_version
        try:
            for _ in range(self.chance.choice([0, 0, 1, 3, 40]) if self.chance else 1):
                await asyncio.sleep(0)
            if name in self.slow:
                await self.slow[name].wait()
            if name in self.fails:
                raise self.fails[name]
        finally:
            self.running -= 1
        turns = [_turn(version) for version in (first, self.policy_version)]
        return [
            [
                Trajectory(task, f"{step}/{name}", m, turns=turns, reward=Reward(1.0))
                for m in range(group_size)
            ]
        ]


def _turn(version: int) -> Turn:
    return Turn([1], Completion([2, 3], [0.0, 0.0], "stop", version), Message("assistant"))


class Learner:
    """The side of the loop: takes the groups of a step, and enters them as trained."""

    def __init__(
        self,
        bound: int,
        *,
        size: int = 5,
        batch_size: int = 2,
        total: int = 6,
        by_arrival: bool = False,
        algorithm: Teaching | None = None,
        script: Scripted | None = None,
        before: Learner | None = None,
    ) -> None:
        self.script, self.order = script or Scripted(), TaskOrder(size, batch_size, 0, shuffle=False)
        self.bound, self.total, self.done = bound, total, 0
        self.rows: list[dict[str, Any]] = []
        self.ledger = Ledger(self.order)
        if before is not None:
            self.done, self.rows = before.done, before.rows
            self.ledger = Ledger.from_state(self.order, {"step": before.done} | before.ledger.make_state())
        self.script.policy_version = self.done
        tasks: Any = [Task(f"t{number}", "?") for number in range(size)]
        script_: Any = self.script
        given = (tasks, self.order, script_, script_, algorithm or Teaching(), RewardClock(None), self.ledger)
        self.source = AsyncSource(
            *given, max_staleness=bound, by_arrival=by_arrival, steps=total, group_size=2
        )

    async def step(self, updating: int = 3) -> StepGroups:
        """Take a step and learn from it, for so many turns of the event loop."""
        batch = await asyncio.wait_for(self.source.take(self.done), 10)
        for _ in range(updating):
            await asyncio.sleep(0)
        self.done += 1
        groups = [[group.number, group.attempt, group.position] for group in batch.groups]
        self.rows.append({"step": self.done, "groups": groups})
        self.ledger.mark_trained(batch.groups)
        self.script.policy_version = self.done
        return batch
