"""Where the episodes of a step come from: sampled now, or played or read (`recorded.py`). Which tasks a step takes
follows from the seed, the step and how many were taken before, so that a resumed run goes on as if nothing had
happened."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from TrainingFactory.protocols import Episode, RewardFunction, Sampler
from TrainingFactory.rewards.adapt import group_reward
from TrainingFactory.rollout import AsyncRolloutEngine, rollout_metrics
from TrainingFactory.rollout.scoring import score
from TrainingFactory.rollout.seeds import turn_seed
from TrainingFactory.services.build.rewards import judge_metrics
from TrainingFactory.services.training.waiting import RewardsAwaited
from TrainingFactory.types import Reward, Task, Trajectory

Groups = list[list[Trajectory]]
Publish = Callable[[], Sampler]  # the newest weights, ready to be sampled from


class Order:
    """Numbers below `size` without end: every number once an epoch, shuffled by the seed and the epoch. `taken` counts
    those that the finished steps took; a batch ends where an epoch does."""

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.steps_per_epoch = -(-size // batch_size)
        self.taken = 0
        self._epoch, self._shuffled = -1, list[int]()

    def start(self, step: int) -> int:
        """How many are taken before a step, if every step takes one batch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return epoch * self.size + place * self.batch_size

    def batch(self, step: int) -> list[int]:
        return self.take(self.start(step), self.batch_size)

    def take(self, start: int, count: int) -> list[int]:
        """The numbers after the first `start`: so many, or fewer where the epoch ends."""
        epoch, place = divmod(start, self.size)
        if epoch != self._epoch:
            self._shuffled = sorted(
                range(self.size), key=lambda n: turn_seed(self.seed, epoch, f"{n}", -1, -1)
            )
            self._epoch = epoch
        return self._shuffled[place : place + count]

    def left(self, start: int) -> int:
        """How many the epoch has after the first `start`."""
        return self.size - start % self.size


class Source(Protocol):
    @property
    def order(self) -> Order: ...
    def ids(self, step: int) -> list[str]:
        """Of the tasks that the step takes."""
        ...

    def groups(self, step: int, publish: Publish) -> Groups: ...
    def metrics(self, groups: Groups, seconds: float) -> dict[str, float]:
        """Of these episodes, which it took so many seconds to get."""
        ...

    def unusable(self, groups: Groups) -> str | None:
        """Why too little can be learned from these episodes, or None."""
        ...


class RewardClock:
    """The reward, timed, with what it spends. Seconds add up over episodes and groups that are scored side by side."""

    def __init__(self, reward: RewardFunction | None, say: Callable[[str], None] = lambda _: None) -> None:
        self.reward, self._group = reward, group_reward(reward)
        self._awaited = RewardsAwaited(say)
        self.grouped = self._group is not None
        self.compares = self._group is not None and self._group.compares
        self.seconds = 0.0
        self._spent = judge_metrics(reward)  # by judges, when it was asked last

    def spent(self) -> dict[str, float]:
        """What judges and pools in the reward have asked, done and spent since the last time."""
        before, self._spent = self._spent, judge_metrics(self.reward)
        return {name: value - before.get(name, 0.0) for name, value in self._spent.items()}

    async def __call__(self, episode: Episode) -> Reward:
        with self._timed(), self._awaited.one(1):
            return await score(episode, self.reward)  # type: ignore[arg-type]

    async def group(self, episodes: Sequence[Episode]) -> Sequence[Reward | Exception]:
        assert self._group is not None
        with self._timed(), self._awaited.one(len(episodes)):
            return await self._group.group(episodes)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


class SampledEpisodes:
    """`group_size` episodes of each task of the step, by the newest weights. With `refill`, tasks that teach nothing
    are made up for by the next ones of the order, in so many rounds at most; no step goes beyond the end of an epoch,
    so that none has a task twice. Where more than the share `max_unscored` has no reward, the step is unusable."""

    def __init__(
        self,
        tasks: Sequence[Task],
        order: Order,
        rollouts: AsyncRolloutEngine,
        group_size: int,
        clock: RewardClock,
        teaches: Callable[[Sequence[Trajectory]], bool] = bool,
        refill: int = 0,
        max_unscored: float = 1.0,
    ) -> None:
        self.tasks, self.order, self.rollouts, self.group_size = tasks, order, rollouts, group_size
        self.clock = clock  # the one that the rollouts score by
        self.teaches, self.refill, self.max_unscored = teaches, refill, max_unscored
        self._ids: list[str] = []  # of the tasks of the latest step
        self._first = 0  # how many of them are its first batch
        self._dropped = 0  # how many taught nothing
        self.teaching = 0  # how many taught something

    def ids(self, step: int) -> list[str]:
        return self._ids

    def groups(self, step: int, publish: Publish) -> Groups:
        self.clock.seconds = 0.0
        sampler, order = publish(), self.order
        groups = latest = self._play(order.take(order.taken, order.batch_size), sampler, step)
        left = order.left(order.taken)
        self._first, teaching = len(groups), sum(map(self.teaches, groups))
        for _ in range(self.refill):
            missing = min(order.batch_size - teaching, left - len(groups))
            if not missing or self.unusable(latest):
                break
            latest = self._play(order.take(order.taken + len(groups), missing), sampler, step)
            teaching += sum(map(self.teaches, latest))
            groups = groups + latest
        self.teaching, self._dropped = teaching, len(groups) - teaching
        self._ids = [group[0].task.id for group in groups]
        return groups

    def _play(self, numbers: Sequence[int], sampler: Sampler, step: int) -> Groups:
        tasks = [self.tasks[number] for number in numbers]
        return self.rollouts.rollout(tasks, sampler, self.group_size, step)

    def metrics(self, groups: Groups, seconds: float) -> dict[str, float]:
        """`accuracy` is the share of scored episodes whose outcome is over 0. `tools` and `reward` seconds add up
        over episodes that run side by side; `tools_share` is the part of the episodes' time that tools took.
        `groups/dropped` taught nothing, `groups/refilled` were sampled to make up for such. To be called once a
        step: `judge/...` and `pool/...` are what was asked and spent since the last time."""
        episodes = [trajectory for group in groups for trajectory in group]
        metrics = rollout_metrics(episodes)
        outcomes = [trajectory.reward.outcome for trajectory in episodes if trajectory.reward is not None]
        if outcomes:
            metrics["accuracy"] = sum(outcome > 0 for outcome in outcomes) / len(outcomes)
        metrics["episodes/failed"] = metrics["episodes/error"] + metrics["episodes/tool_failure"]
        tools = sum(result.seconds for t in episodes for turn in t.turns for result in turn.tool_results)
        spent = sum(trajectory.seconds for trajectory in episodes)
        return metrics | {
            "groups/dropped": self._dropped,
            "groups/refilled": len(groups) - self._first,
            "seconds/tools": tools,
            "seconds/reward": self.clock.seconds,
            "tools_share": tools / spent if spent else 0.0,
            "tokens_per_second": metrics["sampled_tokens"] / seconds,
            **self.clock.spent(),
        }

    def unusable(self, groups: Groups) -> str | None:
        episodes = [trajectory for group in groups for trajectory in group]
        unscored = [trajectory for trajectory in episodes if trajectory.reward is None]
        if len(unscored) < len(episodes) and len(unscored) <= self.max_unscored * len(episodes):
            return None
        reason = most_frequent(unscored)
        what = f"{len(unscored)} of {len(episodes)} episodes could not be scored"
        if len(unscored) == len(episodes):
            what = f"none of {len(episodes)} episodes could be scored"
        return f"{what}, and reward.max_unscored is {self.max_unscored:g}; mostly: {reason}"


def most_frequent(unscored: Sequence[Trajectory]) -> str:
    """Why they have no reward: one reason of the most frequent kind. Those that differ in numbers or in what they
    quote are alike."""
    reasons = [trajectory.error or "no reason given" for trajectory in unscored]
    kinds = [re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "", reason) for reason in reasons]
    [(most, _)] = Counter(kinds).most_common(1)
    return reasons[kinds.index(most)]
