"""Where the groups of a step come from, with their credit: sampled now, played by an expert, or read from a dataset.
Which tasks a step takes follows from the seed and from how many were taken before: so a resumed run goes on exactly."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from TrainingFactory.protocols import Algorithm, ChatFormat, EnvironmentFactory, Sampler
from TrainingFactory.rollout import AsyncRolloutEngine, play, rollout_metrics
from TrainingFactory.services.training.order import Order
from TrainingFactory.services.training.reward_clock import RewardClock
from TrainingFactory.services.training.tokenized import TokenizedDataset
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Group, Sample, Task, Trajectory


@dataclass(slots=True)
class StepGroups:
    """The groups of one training step, in order, and what getting them was like."""

    step: int
    groups: list[Group]
    taken: int  # tasks or examples of the order, up to and with this step
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    problem: str | None = None  # why too little can be learned from them
    sampled: bool = False  # by the policy itself

    @property
    def rows(self) -> list[Sample]:
        return [row for group in self.groups for row in group.rows]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


class Source(Protocol):
    async def take(self, step: int) -> StepGroups:
        """Get the groups of a step. Steps are asked for in order."""
        ...


class Stream:
    """The steps of a run, one after the other. `bound` says how many the source may run ahead of the one that is being
    learned from; at 0 sampling and learning never overlap."""

    def __init__(self, source: Source, first: int, total: int, bound: int = 0) -> None:
        self._source, self._next, self._total, self._bound = source, first, total, bound
        self._ahead: deque[asyncio.Future[StepGroups]] = deque()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StepGroups:
        while self._next < self._total and len(self._ahead) <= self._bound:
            self._ahead.append(asyncio.ensure_future(self._source.take(self._next)))
            self._next += 1
        if not self._ahead:
            raise StopAsyncIteration
        try:
            return await self._ahead.popleft()
        except BaseException:
            await self.close()
            raise

    async def end(self) -> None:
        """Give nothing more."""
        self._total = self._next
        await self.close()

    async def close(self) -> None:
        """Cancel what is under way."""
        while self._ahead:
            self._ahead[-1].cancel()
            await asyncio.gather(self._ahead.pop(), return_exceptions=True)


class SampledSource:
    """`group_size` episodes of each task of the step, by the newest weights. Where the algorithm refills, tasks that
    teach nothing are made up for by the next ones of the order, but not beyond an epoch. Where more than the share
    `max_unscored` has no reward, the step has a problem. `taken` is how many tasks were taken before."""

    def __init__(
        self,
        tasks: Sequence[Task],
        order: Order,
        rollouts: AsyncRolloutEngine,
        sampler: Sampler,
        algorithm: Algorithm,
        clock: RewardClock,
        *,
        group_size: int,
        max_unscored: float = 1.0,
        taken: int = 0,
    ) -> None:
        self._tasks, self._order, self._rollouts, self._sampler = tasks, order, rollouts, sampler
        self._algorithm, self._clock = algorithm, clock  # the clock that the rollouts score by
        self._group_size, self._max_unscored, self._taken = group_size, max_unscored, taken

    async def take(self, step: int) -> StepGroups:
        started = time.perf_counter()
        self._clock.seconds = 0.0
        places = [step * self._order.batch_size + place for place in range(self._order.batch_size)]
        left = self._order.left(self._taken)
        groups = latest = await self._play(step, places, 0)
        for attempt in range(1, self._algorithm.refill + 1):
            open_places = [group.number for group in latest if not group.rows][: left - len(groups)]
            if not open_places or self._problem(latest):
                break
            latest = await self._play(step, open_places, attempt)
            groups = groups + latest
        seconds = time.perf_counter() - started
        problem, metrics = self._problem(groups), self._metrics(groups, seconds)
        return StepGroups(step, groups, self._taken, seconds, metrics, problem, sampled=True)

    async def _play(self, step: int, places: Sequence[int], attempt: int) -> list[Group]:
        tasks = [self._tasks[number] for number in self._order.take(self._taken, len(places))]
        self._taken += len(tasks)
        played = await self._rollouts.rollout_batch(tasks, self._sampler, self._group_size, step)
        adjusted = [self._algorithm.adjusted(group) for group in played]
        credited = await in_thread(lambda: [self._algorithm.samples(group) for group in adjusted])
        found = zip(places, adjusted, credited, strict=False)  # an epoch may end before the places do
        return [Group(number, group, rows, attempt) for number, group, rows in found]

    def _metrics(self, groups: Sequence[Group], seconds: float) -> dict[str, float]:
        """Sum the step up; seconds of `tools` and `reward` add up over episodes that run side by side."""
        episodes = [trajectory for group in groups for trajectory in group.trajectories]
        metrics = rollout_metrics(episodes)
        outcomes = [trajectory.reward.outcome for trajectory in episodes if trajectory.reward is not None]
        if outcomes:
            metrics["accuracy"] = sum(outcome > 0 for outcome in outcomes) / len(outcomes)
        metrics["episodes/failed"] = metrics["episodes/error"] + metrics["episodes/tool_failure"]
        tools = sum(result.seconds for t in episodes for turn in t.turns for result in turn.tool_results)
        spent = sum(trajectory.seconds for trajectory in episodes)
        return metrics | {
            "groups/dropped": sum(not group.rows for group in groups),
            "groups/refilled": sum(group.attempt > 0 for group in groups),
            "seconds/tools": tools,
            "seconds/reward": self._clock.seconds,
            "tools_share": tools / spent if spent else 0.0,
            "tokens_per_second": metrics["sampled_tokens"] / seconds,
            **self._clock.spent(),
        }

    def _problem(self, groups: Sequence[Group]) -> str | None:
        episodes = [trajectory for group in groups for trajectory in group.trajectories]
        unscored = [trajectory for trajectory in episodes if trajectory.reward is None]
        if len(unscored) < len(episodes) and len(unscored) <= self._max_unscored * len(episodes):
            return None
        what = f"{len(unscored)} of {len(episodes)} episodes could not be scored"
        if len(unscored) == len(episodes):
            what = f"none of {len(episodes)} episodes could be scored"
        limit = f"reward.max_unscored is {self._max_unscored:g}"
        return f"{what}, and {limit}; mostly: {most_frequent(unscored)}"


class ExpertSource:
    """The environment's own expert plays the tasks of the step."""

    def __init__(
        self,
        tasks: Sequence[Task],
        order: Order,
        environment: EnvironmentFactory,
        chat: ChatFormat,
        algorithm: Algorithm,
        limits: dict[str, Any],
    ) -> None:
        self._tasks, self._order, self._environment = tasks, order, environment
        self._chat, self._algorithm, self._limits = chat, algorithm, limits

    async def take(self, step: int) -> StepGroups:
        started = time.perf_counter()
        tasks = [self._tasks[number] for number in self._order.batch(step)]
        played = await asyncio.gather(*(self._play(task, step) for task in tasks))
        groups = numbered(step, self._order, [[each] for each in played], self._algorithm)
        return demonstrated(step, self._order, groups, time.perf_counter() - started)

    async def _play(self, task: Task, step: int) -> Trajectory:
        environment: Any = self._environment(task)
        key = EpisodeKey(step, task.id, 0)
        found = await play(environment, self._chat, environment.expert(), key=key, **self._limits)
        if found.status in ("error", "tool_failure") or not found.turns:
            raise ValueError(f"demonstration {task.id} cannot be played: {found.error or found.status}")
        return found


class DatasetSource:
    """The examples of the step."""

    def __init__(self, dataset: TokenizedDataset, order: Order, algorithm: Algorithm) -> None:
        self._dataset, self._order, self._algorithm = dataset, order, algorithm

    async def take(self, step: int) -> StepGroups:
        started = time.perf_counter()
        groups = await in_thread(self._groups, step)
        found = demonstrated(step, self._order, groups, time.perf_counter() - started)
        found.metrics |= self._dataset.left_out
        return found

    def _groups(self, step: int) -> list[Group]:
        examples = self._order.batch(step)
        played = [self._dataset.group(number) for number in examples]
        groups = numbered(step, self._order, played, self._algorithm)
        for number, group in zip(examples, groups, strict=True):
            self._dataset.fill(number, group.rows)
        return groups


def numbered(
    step: int, order: Order, played: Sequence[list[Trajectory]], algorithm: Algorithm
) -> list[Group]:
    """Give groups that exist their numbers and their rows."""
    first = step * order.batch_size
    return [Group(first + n, group, algorithm.samples(group)) for n, group in enumerate(played)]


def demonstrated(step: int, order: Order, groups: list[Group], seconds: float) -> StepGroups:
    """Sum groups up that were not sampled: they are usable, and their rewards say nothing about the model."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    turns = sum(len(trajectory.turns) for trajectory in episodes) / len(episodes)
    metrics = {"demonstrations": float(len(groups)), "turns": turns}
    return StepGroups(step, groups, order.start(step) + len(groups), seconds, metrics)


def most_frequent(unscored: Sequence[Trajectory]) -> str:
    """Return a reason of the most frequent kind; those that differ in numbers or in what they quote are alike."""
    reasons = [trajectory.error or "no reason given" for trajectory in unscored]
    kinds = [re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "", reason) for reason in reasons]
    [(most, _)] = Counter(kinds).most_common(1)
    return reasons[kinds.index(most)]
