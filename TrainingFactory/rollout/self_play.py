"""Rollouts in which one policy plays both roles of a game against itself."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from TrainingFactory.common.seeds import turn_seed
from TrainingFactory.envs.self_play import Match, SelfPlayEnvironment
from TrainingFactory.protocols import Sampler
from TrainingFactory.rollout.engine import RolloutEngine
from TrainingFactory.rollout.episode import EpisodeRun
from TrainingFactory.rollout.group_scoring import gather_or_cancel
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.types import Task, Trajectory

UNLIMITED = asyncio.Semaphore(2**31)  # the match has its place already


class SelfPlayRollouts(RolloutEngine):
    """Plays `group_size` games of each task. Game n is two episodes, members n and group_size + n of the task's group,
    which take one place at the gate: each waits for the other's moves."""

    def __init__(self, environment: type[SelfPlayEnvironment], *args: Any, **options: Any) -> None:
        super().__init__(environment, *args, **options)  # pyright: ignore[reportArgumentType]
        self._game = environment
        name = environment.__name__
        if len(environment.roles) != 2 or len(set(environment.roles)) != 2:
            raise ValueError(f"{name}.roles must be two names, not {environment.roles!r}")
        if self.branching is not None:
            raise ValueError(f"training.branching does not apply to self-play ({name}): remove it")
        if self.group_reward is not None:
            raise ValueError(f"{name} scores its roles itself: set reward.type=environment")

    def _open(
        self,
        tasks: Sequence[Task],
        names: Sequence[str],
        sampler: Sampler,
        group_size: int,
        step: int,
        recorded_as: int | str,
    ) -> list[EpisodeRun]:
        runs: list[EpisodeRun] = []
        for task, name in zip(tasks, names, strict=True):
            matches = [Match(self._game) for _ in range(group_size)]
            for role in self._game.roles:
                for match in matches:
                    member = len(runs) % (2 * group_size)
                    trajectory = Trajectory(task, group=f"{step}/{name}", member=member, role=role)
                    seed_of = functools.partial(turn_seed, self.seed, step, name, member)
                    run = self._new(trajectory, sampler, seed_of, EpisodeKey(recorded_as, name, member))
                    run.rules = dataclasses.replace(
                        self.rules, environment=functools.partial(match.seat, role)
                    )
                    runs.append(run)
        return runs

    async def _run_all(self, groups: Sequence[list[EpisodeRun]], gate: asyncio.Semaphore) -> None:
        halves = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in groups]
        matches = [match for firsts, seconds in halves for match in zip(firsts, seconds, strict=True)]
        await gather_or_cancel([self._play_match(match, gate) for match in matches])

    async def _play_match(self, match: Sequence[EpisodeRun], gate: asyncio.Semaphore) -> None:
        async with gate:
            await gather_or_cancel([self._run(run, UNLIMITED) for run in match])
