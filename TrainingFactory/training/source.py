"""Sources of a step's groups, with credit assigned: sampled by the policy, played by an expert, or read from a dataset.
The seed and the tasks taken before determine a step's tasks, so that a resumed run continues exactly."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from TrainingFactory.protocols import Algorithm, ChatFormat, EnvironmentFactory, Sampler
from TrainingFactory.rollout import RolloutEngine, play, rollout_metrics
from TrainingFactory.rollout.metrics import get_leaf_weights
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.training.filters import EpisodeFilters, compute_filter_metrics, find_dropped_problem
from TrainingFactory.training.ledger import Ledger
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.training.task_order import TaskOrder
from TrainingFactory.training.tokenized_dataset import TokenizedDataset
from TrainingFactory.types import Group, Sample, Task, Trajectory


@dataclass(slots=True)
class StepGroups:
    """The groups of one training step, in order, with their metrics."""

    step: int
    groups: list[Group]
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    problem: str | None = None  # why the step is unusable for training
    is_sampled: bool = False  # by the policy itself
    # (step, name) keys of the recorded tool calls of these groups, and of groups discarded since the previous step.
    # None: all uncommitted calls belong to these groups.
    recorded_keys: set[tuple[int | str, str]] | None = None
    discarded_keys: set[tuple[int | str, str]] = field(default_factory=set)

    def has_recorded(self, key: EpisodeKey) -> bool:
        """Return whether the tool calls of this episode belong to the step."""
        return self.recorded_keys is None or (key.step, key.task) in self.recorded_keys

    @property
    def rows(self) -> list[Sample]:
        return [row for group in self.groups for row in group.rows]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


class Source(Protocol):
    async def take(self, step: int) -> StepGroups:
        """Return the groups of a step. Call it for consecutive steps, each after the update of the previous one."""
        ...

    async def close(self) -> None:
        """Cancel running groups."""


class StepStream:
    """Asynchronous iterator over the steps of a run."""

    def __init__(self, source: Source, first_step: int, total_steps: int) -> None:
        self._source, self._next_step, self._total_steps = source, first_step, total_steps

    def __aiter__(self) -> StepStream:
        return self

    async def __anext__(self) -> StepGroups:
        if self._next_step >= self._total_steps:
            raise StopAsyncIteration
        self._next_step += 1
        return await self._source.take(self._next_step - 1)

    def end(self) -> None:
        """Stop the iteration after the current step."""
        self._total_steps = self._next_step


class SampledSource:
    """Samples `group_size` episodes of each task of the step with the current weights. If the algorithm refills, tasks
    without training rows are replaced by the next ones of the order, within the epoch. A step is unusable for training
    if the share of unscored episodes is larger than `max_unscored`, or if `filters` drop all episodes. `ledger` tracks
    which tasks were taken before."""

    def __init__(
        self,
        tasks: Sequence[Task],
        order: TaskOrder,
        rollouts: RolloutEngine,
        sampler: Sampler,
        algorithm: Algorithm,
        clock: RewardClock,
        ledger: Ledger,
        *,
        group_size: int,
        max_unscored: float = 1.0,
        filters: EpisodeFilters | None = None,
    ) -> None:
        self._filters = filters or EpisodeFilters({})
        self._tasks, self._order, self._rollouts, self._sampler = tasks, order, rollouts, sampler
        self._algorithm, self._reward_clock = algorithm, clock  # the rollouts' reward is this clock
        self._ledger, self._group_size, self._max_unscored = ledger, group_size, max_unscored

    async def take(self, step: int) -> StepGroups:
        start_time = time.perf_counter()
        self._reward_clock.seconds = self._rollouts.tail_seconds = 0.0
        first_number = step * self._order.batch_size
        num_left, numbers = self._ledger.num_left, range(first_number, first_number + self._order.batch_size)
        groups = latest = await self._play_groups(step, numbers, self._ledger.take_positions(len(numbers)), 0)
        for attempt in range(1, self._algorithm.refill + 1):
            refill_numbers = [group.number for group in latest if not group.rows][: num_left - len(groups)]
            if not refill_numbers or find_unscored_problem(latest, self._max_unscored):
                break
            latest = await self._play_groups(
                step, refill_numbers, self._ledger.take_positions(len(refill_numbers)), attempt
            )
            groups = groups + latest
        seconds = time.perf_counter() - start_time
        problem = find_unscored_problem(groups, self._max_unscored) or find_dropped_problem(groups)
        metrics = compute_metrics(groups, seconds, self._reward_clock)
        metrics["tail_share"] = self._rollouts.tail_seconds / seconds
        metrics |= self._count_dropped_forks()
        return StepGroups(step, groups, seconds, metrics, problem, is_sampled=True)

    async def close(self) -> None: ...

    def _count_dropped_forks(self) -> dict[str, float]:
        """Return the number of forks dropped since the last call; empty if episodes do not fork."""
        num_dropped, self._rollouts.dropped_forks = self._rollouts.dropped_forks, 0
        return {} if self._rollouts.branching is None else {"branching/dropped": float(num_dropped)}

    async def _play_groups(
        self,
        step: int,
        group_numbers: Sequence[int],
        positions: Sequence[int],
        attempt: int,
        names: Sequence[str] | None = None,
    ) -> list[Group]:
        """Play a group for each position in the task order, and number the groups. At the end of an epoch, there are
        fewer positions than numbers."""
        tasks = [self._tasks[self._order.get_task_index(position)] for position in positions]
        groups = await self._rollouts.rollout_batch(
            tasks, self._sampler, self._group_size, step, group_names=names
        )
        adjusted_groups = [self._algorithm.adjusted(group) for group in groups]
        slots = [
            (number, attempt, position) for number, position in zip(group_numbers, positions, strict=False)
        ]
        return await in_thread(self._filters.make_groups, adjusted_groups, self._algorithm, slots)


def compute_metrics(groups: Sequence[Group], seconds: float, clock: RewardClock | None) -> dict[str, float]:
    """Return the metrics of a step; seconds of `tools` and `reward` are summed over concurrent episodes."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    metrics = rollout_metrics(episodes)
    rewards = [trajectory.reward for trajectory in episodes if trajectory.reward is not None]
    if rewards:
        weights = get_leaf_weights([trajectory for trajectory in episodes if trajectory.reward is not None])
        num_correct = sum(w for w, reward in zip(weights, rewards, strict=True) if reward.outcome > 0)
        metrics["accuracy"] = num_correct / sum(weights)
    if any(any(reward.steps) for reward in rewards):  # without step rewards these equal the outcomes
        for name, is_correct in (("reward_right", True), ("reward_wrong", False)):
            if selected_rewards := [reward for reward in rewards if (reward.outcome > 0) == is_correct]:
                metrics[name] = fmean(reward.outcome + sum(reward.steps) for reward in selected_rewards)
    metrics["episodes/failed"] = metrics["episodes/error"] + metrics["episodes/tool_failure"]
    turns = [turn for episode in episodes for turn in episode.own_turns]
    tool_seconds = sum(result.seconds for turn in turns for result in turn.tool_results)
    episode_seconds = sum(trajectory.seconds for trajectory in episodes)
    return metrics | {
        "groups/dropped": sum(not group.rows for group in groups),
        "groups/refilled": len(groups) - len({group.number for group in groups}),
        "seconds/tools": tool_seconds,
        "seconds/reward": 0.0 if clock is None else clock.seconds,
        "tools_share": tool_seconds / episode_seconds if episode_seconds else 0.0,
        "tokens_per_second": metrics["sampled_tokens"] / seconds,
        **compute_filter_metrics(groups),
        **({} if clock is None else clock.take_costs()),
    }


def find_unscored_problem(groups: Sequence[Group], max_unscored: float) -> str | None:
    """Return the reason why the groups are unusable for training, if too many episodes are unscored; else None."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    unscored_episodes = [trajectory for trajectory in episodes if trajectory.reward is None]
    if len(unscored_episodes) < len(episodes) and len(unscored_episodes) <= max_unscored * len(episodes):
        return None
    summary = f"{len(unscored_episodes)} of {len(episodes)} episodes could not be scored"
    if len(unscored_episodes) == len(episodes):
        summary = f"none of {len(episodes)} episodes could be scored"
    reason = find_frequent_error(unscored_episodes)
    return f"{summary} (reward.max_unscored is {max_unscored:g}). Most frequent reason: {reason}"


class ExpertSource:
    """Plays the tasks of the step with the environment's `expert`."""

    def __init__(
        self,
        tasks: Sequence[Task],
        order: TaskOrder,
        environment: EnvironmentFactory,
        chat: ChatFormat,
        algorithm: Algorithm,
        play_options: dict[str, Any],
        max_concurrency: int,
    ) -> None:
        self._tasks, self._order, self._environment = tasks, order, environment
        self._chat, self._algorithm, self._play_options = chat, algorithm, play_options
        self._semaphore = asyncio.Semaphore(max_concurrency)

    async def take(self, step: int) -> StepGroups:
        start_time = time.perf_counter()
        tasks = [self._tasks[number] for number in self._order.take_batch(step)]
        episodes = await asyncio.gather(*(self._play_expert(task, step) for task in tasks))
        groups = number_groups(step, self._order, [[episode] for episode in episodes], self._algorithm)
        return make_demonstration_step(step, groups, time.perf_counter() - start_time)

    async def close(self) -> None: ...

    async def _play_expert(self, task: Task, step: int) -> Trajectory:
        key = EpisodeKey(step, task.id, 0)
        async with self._semaphore:
            environment: Any = self._environment(task)
            episode = await play(environment, self._chat, environment.expert(), key=key, **self._play_options)
        if episode.status in ("error", "tool_failure") or not episode.turns:
            raise ValueError(f"Cannot play demonstration {task.id}: {episode.error or episode.status}")
        return episode


class DatasetSource:
    """Reads the examples of the step from a dataset."""

    def __init__(self, dataset: TokenizedDataset, order: TaskOrder, algorithm: Algorithm) -> None:
        self._dataset, self._order, self._algorithm = dataset, order, algorithm

    async def take(self, step: int) -> StepGroups:
        start_time = time.perf_counter()
        groups = await in_thread(self._make_groups, step)
        batch = make_demonstration_step(step, groups, time.perf_counter() - start_time)
        batch.metrics |= self._dataset.skipped_row_counts
        return batch

    async def close(self) -> None: ...

    def _make_groups(self, step: int) -> list[Group]:
        indices = self._order.take_batch(step)
        trajectories = [self._dataset.group(index) for index in indices]
        groups = number_groups(step, self._order, trajectories, self._algorithm)
        for index, group in zip(indices, groups, strict=True):
            self._dataset.fill_rows(index, group.rows)
        return groups


def number_groups(
    step: int, order: TaskOrder, groups: Sequence[list[Trajectory]], algorithm: Algorithm
) -> list[Group]:
    """Return a group for each list of trajectories, with its number, training rows and position in the task order."""
    number, position = step * order.batch_size, order.get_start_position(step)
    return [
        Group(number + i, group, algorithm.samples(group), 0, position + i) for i, group in enumerate(groups)
    ]


def make_demonstration_step(step: int, groups: list[Group], seconds: float) -> StepGroups:
    """Return a step of groups that the policy did not sample. It has no reward metrics, because these rewards say
    nothing about the model."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    mean_turns = sum(len(trajectory.turns) for trajectory in episodes) / len(episodes)
    metrics = {"demonstrations": float(len(groups)), "turns": mean_turns}
    return StepGroups(step, groups, seconds, metrics)


def find_frequent_error(unscored_episodes: Sequence[Trajectory]) -> str:
    """Return an example of the most frequent error, treating errors that differ only in numbers or quotes as one."""
    reasons = [trajectory.error or "no reason given" for trajectory in unscored_episodes]
    patterns = [re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "", reason) for reason in reasons]
    [(top_pattern, _)] = Counter(patterns).most_common(1)
    return reasons[patterns.index(top_pattern)]
