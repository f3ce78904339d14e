"""Many episodes at once. None waits for another: while one episode's tools run, the others are sampled."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from TrainingFactory.common.event_loop import run
from TrainingFactory.common.seeds import turn_seed
from TrainingFactory.protocols import AnyReward, ChatFormat, Environment, Sampler
from TrainingFactory.rewards.adapt import group_reward
from TrainingFactory.rollout.episode import EpisodeRules, EpisodeRun
from TrainingFactory.rollout.group_scoring import GroupRun, all_of
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.timeouts import Clock
from TrainingFactory.types import SamplingParams, Task, Trajectory


class RolloutEngine:
    """Without `reward` the environment's own is used; one that scores whole groups is called when the last episode of a
    group has ended. `on_episode` is told of every episode when its reward is known. An episode's clock
    (`episode_timeout`) starts when it is let in: with more episodes than the sampler has slots, set
    `max_concurrency` to the number of slots. `runtime` is what all tools share. `gate` bounds the episodes of all
    batches together, first come first served; without one every batch has a bound of its own. `clock` counts the
    seconds of episodes, so that its owner can pause them all while nothing can sample."""

    def __init__(
        self,
        environment: Callable[[Task], Environment],
        chat: ChatFormat,
        params: SamplingParams,
        *,
        reward: AnyReward | None = None,
        max_turns: int = 8,
        episode_timeout: float = 300.0,
        max_reply_tokens: int = 1024,
        max_concurrency: int | None = None,
        seed: int = 0,
        on_episode: Callable[[Trajectory], None] | None = None,
        runtime: ToolRuntime | None = None,
        gate: asyncio.Semaphore | None = None,
        clock: Clock | None = None,
    ) -> None:
        params = dataclasses.replace(params, stop_ids=params.stop_ids or chat.stop_ids)
        self.group_reward = group_reward(reward)
        single = reward if self.group_reward is None else None
        self.rules = EpisodeRules(
            environment, chat, params, single, max_turns, episode_timeout, max_reply_tokens, runtime, clock
        )
        self.max_concurrency, self.gate = max_concurrency, gate
        self.seed = seed
        self.on_episode = on_episode
        # Seconds in which fewer than a quarter of the episodes of a batch were left, added up.
        self.tail = 0.0

    async def rollout_batch(
        self,
        tasks: Sequence[Task],
        sampler: Sampler,
        group_size: int = 1,
        step: int = 0,
        recorded_as: str | None = None,
        names: Sequence[str] | None = None,
    ) -> list[list[Trajectory]]:
        """Play `group_size` episodes of each task: one list per task, members in order. Random numbers are keyed by
        `step` and the task's id, or its name in `names`, and so are the tool calls in a recording unless they are
        `recorded_as` something else."""
        key = step if recorded_as is None else recorded_as
        runs = self._open(tasks, names or _names(tasks), sampler, group_size, step, key)
        groups = [runs[start : start + group_size] for start in range(0, len(runs), group_size)]
        gate = self.gate or asyncio.Semaphore(self.max_concurrency or len(runs) or 1)
        try:
            if self.group_reward is None:
                await all_of([self._run(one, gate) for one in runs])
            else:
                await all_of([self._run_group(GroupRun(group, self.group_reward), gate) for group in groups])
        finally:  # also of those that were cancelled before they started
            for one in runs:
                one.leave()
        ended = sorted(one.left for one in runs)
        self.tail += ended[-1] - ended[3 * len(ended) // 4] if ended else 0.0
        return [[one.trajectory for one in group] for group in groups]

    def rollout(
        self, tasks: Sequence[Task], sampler: Sampler, group_size: int = 1, step: int = 0
    ) -> list[list[Trajectory]]:
        """Do so for synchronous callers."""
        return run(lambda: self.rollout_batch(tasks, sampler, group_size, step))

    async def _run(self, one: EpisodeRun, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                await one.run()
        finally:
            one.leave()
        self._tell(one)

    async def _run_group(self, group: GroupRun, gate: asyncio.Semaphore) -> None:
        await group.run(gate)
        for one in group.runs:
            self._tell(one)

    def _tell(self, one: EpisodeRun) -> None:
        if self.rules.runtime is not None and self.rules.runtime.recorder is not None:
            self.rules.runtime.recorder.check()  # a replay that has left its recording ends all episodes
        if self.on_episode is not None:
            self.on_episode(one.trajectory)

    def _open(
        self,
        tasks: Sequence[Task],
        names: Sequence[str],
        sampler: Sampler,
        group_size: int,
        step: int,
        recorded_as: int | str,
    ) -> list[EpisodeRun]:
        """All sessions in order, before anything is awaited: which one an episode gets must not depend on timing."""
        runs: list[EpisodeRun] = []
        for task, name in zip(tasks, names, strict=True):
            for member in range(group_size):
                trajectory = Trajectory(task, group=f"{step}/{name}", member=member)
                seed_of = functools.partial(turn_seed, self.seed, step, name, member)
                runs.append(self._new(trajectory, sampler, seed_of, EpisodeKey(recorded_as, name, member)))
        return runs

    def _new(self, trajectory: Trajectory, sampler: Sampler, *given: Any) -> EpisodeRun:
        return EpisodeRun(self.rules, trajectory, sampler.session(), sampler.max_length, *given)


def _names(tasks: Sequence[Task]) -> list[str]:
    """A task may come twice in a batch: its second group has its own name and its own seeds."""
    seen: Counter[str] = Counter()
    names = []
    for task in tasks:
        seen[task.id] += 1
        names.append(task.id if seen[task.id] == 1 else f"{task.id}#{seen[task.id]}")
    return names
