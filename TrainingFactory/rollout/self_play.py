"""Rollouts in which one policy plays both roles of a game against itself."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from TrainingFactory.envs.self_play import Match, SelfPlayEnvironment
from TrainingFactory.protocols import Sampler
from TrainingFactory.rollout.engine import RolloutEngine
from TrainingFactory.rollout.episode import EpisodeRun
from TrainingFactory.rollout.group_scoring import gather_or_cancel
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.types import Task

PLAYED_STATUSES = ("done", "truncated", "max_turns")


class SelfPlayRollouts(RolloutEngine):
    """Plays `group_size` games of each task. Game n consists of two episodes, members n and group_size + n of the
    task's group. The two together use one slot of the concurrency limit, because each waits for the other's moves. A
    role without a turn has no episode."""

    def __init__(self, environment: Any, *args: Any, **options: Any) -> None:
        super().__init__(environment, *args, **options)
        self._game_class: type[SelfPlayEnvironment] = environment
        class_name = environment.__name__
        if len(environment.roles) != 2 or len(set(environment.roles)) != 2:
            raise ValueError(f"{class_name}.roles must be two names, not {environment.roles!r}")
        if self.branching is not None:
            raise ValueError(f"training.branching does not apply to self-play ({class_name}): remove it")
        if self.group_reward is not None:
            raise ValueError(f"{class_name} scores its roles itself: set reward.type=environment")

    def _open_runs(
        self,
        tasks: Sequence[Task],
        group_names: Sequence[str],
        sampler: Sampler,
        group_size: int,
        step: int,
        step_key: int | str,
    ) -> list[EpisodeRun]:
        runs: list[EpisodeRun] = []
        for task, name in zip(tasks, group_names, strict=True):
            runs_by_role: tuple[list[EpisodeRun], list[EpisodeRun]] = ([], [])
            for game_index in range(group_size):
                match = Match(self._game_class)
                # Both sessions of a game are opened one after the other: a deterministic engine gives a slot to the
                # next session in this order, and neither role can go on without the other.
                for seat, role in enumerate(self._game_class.roles):
                    key = EpisodeKey(step_key, name, seat * group_size + game_index)
                    run = self._open_episode(sampler, task, step, key, role)
                    run.rules = dataclasses.replace(
                        self.rules, make_environment=functools.partial(match.create_seat, role)
                    )
                    runs_by_role[seat].append(run)
            runs += [*runs_by_role[0], *runs_by_role[1]]
        return runs

    async def _run_episodes(self, groups: Sequence[list[EpisodeRun]], gate: asyncio.Semaphore) -> None:
        role_groups = [(group[: len(group) // 2], group[len(group) // 2 :]) for group in groups]
        matches = [match for role_runs in role_groups for match in zip(*role_runs, strict=True)]
        await gather_or_cancel([self._play_match(match, gate) for match in matches])

    async def _play_match(self, match: Sequence[EpisodeRun], gate: asyncio.Semaphore) -> None:
        first_run, second_run = match
        async with gate:
            try:
                await gather_or_cancel([run.run() for run in match])
            finally:
                first_run.close_session()
                second_run.close_session()
        if first_run.trajectory.status in PLAYED_STATUSES and not second_run.trajectory.turns:
            second_run.drop_reason = "the game was over before its first turn"
        self._report_episode(first_run)
        self._report_episode(second_run)
