"""Concurrent rollouts: while one episode's tools run, the sampler works on the others."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from TrainingFactory.common.event_loop import run
from TrainingFactory.common.seeds import derive_seed
from TrainingFactory.protocols import AnyReward, ChatFormat, Environment, Sampler
from TrainingFactory.rewards.adapt import as_group_reward
from TrainingFactory.rollout.branching import Branching, EpisodeForest, Player
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.rollout.folding import Folding
from TrainingFactory.rollout.group_scoring import GroupRun, gather_or_cancel
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.tools.timeouts import PausableClock
from TrainingFactory.types import SamplingParams, Task, Trajectory

log = logging.getLogger(__name__)


class RolloutEngine:
    """Plays batches of episodes concurrently.

    reward: None uses the environment's own; a group reward is called when the last episode of its group has ended.
    episode_timeout: seconds, counted from the episode's admission; so set `max_concurrency` to the sampler's slots.
    on_episode: called with every episode once it is scored.
    runtime: state shared by all tools.
    gate: limits the episodes of all batches together, first come first served; None: `max_concurrency` per batch.
    clock: measures the seconds of episodes; its owner pauses it while no sampler is alive.
    folding: shortens conversations that exceed a token limit; None: never.
    branching: rules for forking episodes; forked episodes are further members of their group. None: no forks."""

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
        branching: Branching | None = None,
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
        self.branching = branching
        self.dropped_forks = 0  # total of continuations whose environment could not be forked
        self._warnings: set[str] = set()
        self.tail_seconds = 0.0  # in which at most a quarter of a batch's episodes were still running

    async def rollout_batch(
        self,
        tasks: Sequence[Task],
        sampler: Sampler,
        group_size: int = 1,
        step: int = 0,
        recording_key: str | None = None,
        group_names: Sequence[str] | None = None,
    ) -> list[list[Trajectory]]:
        """Play `group_size` episodes of each task. Return one list of episodes per task, ordered by member. Seeds and
        recorded tool calls are keyed by `step` and the task's id. `group_names` replaces the ids in both;
        `recording_key` replaces `step` for tool calls only."""
        step_key = step if recording_key is None else recording_key
        group_names = group_names or _make_group_names(tasks)
        runs = self._open_runs(tasks, group_names, sampler, group_size, step, step_key)
        runs_per_task = len(runs) // len(tasks) if tasks else 1
        groups = [runs[start : start + runs_per_task] for start in range(0, len(runs), runs_per_task)]
        gate = self.gate or asyncio.Semaphore(self.max_concurrency or len(runs) or 1)
        if self.branching is not None:
            seed_functions = [functools.partial(derive_seed, self.seed, step, name) for name in group_names]
            return await self._rollout_trees(self.branching, groups, seed_functions, gate)
        try:
            if self.group_reward is None:
                await self._run_episodes(groups, gate)
            else:
                await gather_or_cancel(
                    [self._run_group(GroupRun(group, self.group_reward), gate) for group in groups]
                )
        finally:  # including episodes that were cancelled before they started
            for episode in runs:
                episode.close_session()
        self._measure_tail(runs)
        return [[run.trajectory for run in group if run.drop_reason is None] for group in groups]

    async def _run_episodes(self, groups: Sequence[list[EpisodeRun]], gate: asyncio.Semaphore) -> None:
        await gather_or_cancel([self._run_episode(episode, gate) for group in groups for episode in group])

    def _measure_tail(self, runs: Sequence[EpisodeRun]) -> None:
        end_times = sorted(episode.session_closed_at for episode in runs)
        self.tail_seconds += end_times[-1] - end_times[3 * len(end_times) // 4] if end_times else 0.0

    def rollout(
        self, tasks: Sequence[Task], sampler: Sampler, group_size: int = 1, step: int = 0
    ) -> list[list[Trajectory]]:
        """Run `rollout_batch` from synchronous code."""
        return run(lambda: self.rollout_batch(tasks, sampler, group_size, step))

    async def _rollout_trees(
        self,
        branching: Branching,
        groups: list[list[EpisodeRun]],
        seed_functions: Sequence[Callable[[int, int], int]],
        gate: asyncio.Semaphore,
    ) -> list[list[Trajectory]]:
        recorder = None if self.rules.runtime is None else self.rules.runtime.recorder
        forest = EpisodeForest(branching, groups, seed_functions, self._warn_once, recorder)
        play = functools.partial(self._run_episode if self.group_reward is None else GroupRun.play, gate=gate)
        try:
            if branching.in_waves:
                await forest.play_in_waves(play)
            await gather_or_cancel([self._run_trees(forest, i, play) for i in range(len(groups))])
        finally:  # including forks that were cancelled before they started
            for episode in forest.runs:
                episode.close_session()
            await asyncio.gather(*(episode.close() for episode in forest.runs))
        trajectories = forest.finish()
        self.dropped_forks += forest.num_dropped
        self._measure_tail(forest.runs)
        return trajectories

    async def _run_trees(self, forest: EpisodeForest, group_index: int, player: Player) -> None:
        """Play a group and the episodes forked from it, unless `play_in_waves` has played them already. Then apply the
        group reward, if there is one."""

        async def play_all() -> None:
            if not forest.branching.in_waves:
                await forest.play_group(group_index, player)

        if self.group_reward is None:
            await play_all()
            return
        group = GroupRun(forest.groups[group_index], self.group_reward)
        await group.run(play_all)
        for episode in group.runs:
            self._report_episode(episode)

    def _warn_once(self, warning: str) -> None:
        """Log a problem as a warning the first time, afterwards as information."""
        log.log(logging.INFO if warning in self._warnings else logging.WARNING, "%s", warning)
        self._warnings.add(warning)

    async def _run_episode(self, episode: EpisodeRun, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                await episode.run()
        finally:
            episode.close_session()
        self._report_episode(episode)

    async def _run_group(self, group: GroupRun, gate: asyncio.Semaphore) -> None:
        await group.run(lambda: gather_or_cancel([group.play(episode, gate) for episode in group.runs]))
        for episode in group.runs:
            self._report_episode(episode)

    def _report_episode(self, episode: EpisodeRun) -> None:
        if self.rules.runtime is not None and self.rules.runtime.recorder is not None:
            self.rules.runtime.recorder.check_replay()  # raises if a replay has diverged from its recording
        if self.on_episode is not None and episode.drop_reason is None:
            self.on_episode(episode.trajectory)

    def _open_runs(
        self,
        tasks: Sequence[Task],
        group_names: Sequence[str],
        sampler: Sampler,
        group_size: int,
        step: int,
        step_key: int | str,
    ) -> list[EpisodeRun]:
        """Create all episodes and open their sampling sessions in order, before anything is awaited, so that the
        assignment of sessions does not depend on timing."""
        runs: list[EpisodeRun] = []
        for task, name in zip(tasks, group_names, strict=True):
            for member in range(group_size):
                runs.append(self._open_episode(sampler, task, step, EpisodeKey(step_key, name, member)))
        return runs

    def _open_episode(
        self, sampler: Sampler, task: Task, step: int, key: EpisodeKey, role: str | None = None
    ) -> EpisodeRun:
        trajectory = Trajectory(task, group=f"{step}/{key.task}", member=key.member, role=role)
        seed_of = functools.partial(derive_seed, self.seed, step, key.task, key.member)
        return self._make_run(trajectory, sampler, seed_of, key)

    def _make_run(self, trajectory: Trajectory, sampler: Sampler, *args: Any) -> EpisodeRun:
        return EpisodeRun(self.rules, trajectory, sampler.session(), sampler.max_length, *args)


def _make_group_names(tasks: Sequence[Task]) -> list[str]:
    """Return a unique name per group: a task that occurs twice in a batch gets a second name, with its own seeds."""
    id_counts: Counter[str] = Counter()
    group_names = []
    for task in tasks:
        id_counts[task.id] += 1
        group_names.append(task.id if id_counts[task.id] == 1 else f"{task.id}#{id_counts[task.id]}")
    return group_names
