"""Concurrent rollouts: while one episode's tools run, the sampler works on the others."""

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
from TrainingFactory.rewards.adapt import as_group_reward
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.rollout.folding import Folding
from TrainingFactory.rollout.group_scoring import GroupRun, gather_or_cancel
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.timeouts import PausableClock
from TrainingFactory.types import SamplingParams, Task, Trajectory


class RolloutEngine:
    """Plays batches of episodes concurrently.

    reward: None uses the environment's own; a group reward is called when the last episode of its group has ended.
    episode_timeout: seconds, from when the episode is admitted; so set `max_concurrency` to the sampler's slots.
    on_episode: called with every episode once it is scored.
    runtime: state shared by all tools.
    gate: limits the episodes of all batches together, first come first served; None: `max_concurrency` per batch.
    clock: measures the seconds of episodes; its owner pauses it while no sampler is alive.
    folding: shortens conversations that exceed a token limit; None: never."""

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
        clock: PausableClock | None = None,
        folding: Folding | None = None,
    ) -> None:
        params = dataclasses.replace(params, stop_ids=params.stop_ids or chat.stop_ids)
        self.group_reward = as_group_reward(reward)
        single_reward = reward if self.group_reward is None else None
        self.rules = EpisodeSettings(
            environment,
            chat,
            params,
            single_reward,
            max_turns,
            episode_timeout,
            max_reply_tokens,
            runtime,
            clock,
            folding,
        )
        self.max_concurrency, self.gate = max_concurrency, gate
        self.seed = seed
        self.on_episode = on_episode
        self.tail = 0.0  # total seconds in which at most a quarter of a batch's episodes were still running

    async def rollout_batch(
        self,
        tasks: Sequence[Task],
        sampler: Sampler,
        group_size: int = 1,
        step: int = 0,
        recorded_as: str | None = None,
        names: Sequence[str] | None = None,
    ) -> list[list[Trajectory]]:
        """Play `group_size` episodes of each task and return one list per task, members in order. Seeds and recorded
        tool calls are keyed by `step` (calls: or by `recorded_as`) and the task's id, or its name in `names`."""
        key = step if recorded_as is None else recorded_as
        runs = self._open(tasks, names or _names(tasks), sampler, group_size, step, key)
        groups = [runs[start : start + group_size] for start in range(0, len(runs), group_size)]
        gate = self.gate or asyncio.Semaphore(self.max_concurrency or len(runs) or 1)
        try:
            if self.group_reward is None:
                await gather_or_cancel([self._run(episode, gate) for episode in runs])
            else:
                await gather_or_cancel(
                    [self._run_group(GroupRun(group, self.group_reward), gate) for group in groups]
                )
        finally:  # including episodes that were cancelled before they started
            for episode in runs:
                episode.leave()
        end_times = sorted(episode.session_closed_at for episode in runs)
        self.tail += end_times[-1] - end_times[3 * len(end_times) // 4] if end_times else 0.0
        return [[episode.trajectory for episode in group] for group in groups]

    def rollout(
        self, tasks: Sequence[Task], sampler: Sampler, group_size: int = 1, step: int = 0
    ) -> list[list[Trajectory]]:
        """Run `rollout_batch` from synchronous code."""
        return run(lambda: self.rollout_batch(tasks, sampler, group_size, step))

    async def _run(self, episode: EpisodeRun, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                await episode.run()
        finally:
            episode.leave()
        self._report(episode)

    async def _run_group(self, group: GroupRun, gate: asyncio.Semaphore) -> None:
        await group.run(gate)
        for episode in group.runs:
            self._report(episode)

    def _report(self, episode: EpisodeRun) -> None:
        if self.rules.runtime is not None and self.rules.runtime.recorder is not None:
            self.rules.runtime.recorder.check()  # raises if a replay has diverged from its recording
        if self.on_episode is not None:
            self.on_episode(episode.trajectory)

    def _open(
        self,
        tasks: Sequence[Task],
        names: Sequence[str],
        sampler: Sampler,
        group_size: int,
        step: int,
        recorded_as: int | str,
    ) -> list[EpisodeRun]:
        """Open all sessions in order before anything is awaited, so that their assignment does not depend on timing."""
        runs: list[EpisodeRun] = []
        for task, name in zip(tasks, names, strict=True):
            for member in range(group_size):
                trajectory = Trajectory(task, group=f"{step}/{name}", member=member)
                seed_of = functools.partial(turn_seed, self.seed, step, name, member)
                runs.append(self._new(trajectory, sampler, seed_of, EpisodeKey(recorded_as, name, member)))
        return runs

    def _new(self, trajectory: Trajectory, sampler: Sampler, *args: Any) -> EpisodeRun:
        return EpisodeRun(self.rules, trajectory, sampler.session(), sampler.max_length, *args)


def _names(tasks: Sequence[Task]) -> list[str]:
    """Return a unique name per group: a task that occurs twice in a batch gets a second name, with its own seeds."""
    counts: Counter[str] = Counter()
    names = []
    for task in tasks:
        counts[task.id] += 1
        names.append(task.id if counts[task.id] == 1 else f"{task.id}#{counts[task.id]}")
    return names
