"""Judges of a whole group: two at a time, or all at once. One episode alone cannot be compared, and is not scored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.judge.base import Judge, more_than_half, most_of
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.judge.prompts import trajectory_text
from TrainingFactory.rewards.judge.verdicts import MAX_CANDIDATES, Pairwise, Ranking, voted
from TrainingFactory.types import Reward, Trajectory


@dataclass(kw_only=True, eq=False)
class PairJudge(Judge):
    """Compares two at a time, in both orders, so that the place of a text cannot decide. As the reward of a group:
    the share of its comparisons that an episode wins, each against the next `opponents` (all if None). Who has no
    answer loses against who has one, without asking."""

    opponents: int | None = None

    async def ordered(self, first: Trajectory, second: Trajectory, repeat: int = 0) -> float:
        """Return how much better the first is, shown in this order only: 1 it is, 0 the other is."""
        reasoning, verdict = self.prompt.reasoning, Pairwise()
        values = self.prompt.values(
            first.task,
            first=trajectory_text(first, reasoning, prompt=False),
            second=trajectory_text(second, reasoning, prompt=False),
        )
        return await self._samples(values, verdict.instruction, verdict.read, repeat)

    async def compare(self, first: Trajectory, second: Trajectory) -> float:
        """Return the mean over both orders."""
        one, other = await asyncio.gather(self.ordered(first, second), self.ordered(second, first))
        return (one + 1 - other) / 2

    async def __call__(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        """Return each episode's share. A comparison without a verdict is left out; an episode needs more than half of
        its own, and one that has not is told why. Where no episode has, that is raised."""
        trajectories = _several(episodes)
        failed = [self.failed(each) for each in trajectories]
        count = len(trajectories)
        reach = min(self.opponents or count, count - 1)
        around = ((a, (a + step) % count) for a in range(count) for step in range(1, reach + 1))
        pairs = sorted({(min(pair), max(pair)) for pair in around})

        async def share(first: int, second: int) -> float:
            if failed[first] or failed[second]:
                return 0.5 * (1 + failed[second] - failed[first])
            return await self.compare(trajectories[first], trajectories[second])

        shares = await asyncio.gather(*(share(*pair) for pair in pairs), return_exceptions=True)
        won: list[list[float | BaseException]] = [[] for _ in trajectories]
        for (first, second), found in zip(pairs, shares, strict=True):
            won[first].append(found)
            won[second].append(found if isinstance(found, BaseException) else 1 - found)
        rewards = [self._share(each) for each in won]
        if all(isinstance(each, Exception) for each in rewards):
            more_than_half(won[0])  # raises its first failure
        return rewards

    def _share(self, won: Sequence[float | BaseException]) -> Reward | Exception:
        try:
            had = more_than_half(won)
        except JudgeFailure as failure:
            return failure
        return self._rewarded(sum(had) / len(had))


@dataclass(kw_only=True, eq=False)
class RankingJudge(Judge):
    """Shows a whole group at once and lets the judge order it: 1 for the best, 0 for the worst. With several samples
    every candidate stands in another place each time. Episodes without an answer get 0 and are not shown."""

    async def __call__(self, episodes: Sequence[Episode]) -> list[Reward]:
        trajectories = _several(episodes)
        failed = [self.failed(each) for each in trajectories]
        shown = [each for each, lost in zip(trajectories, failed, strict=True) if not lost]
        scores = iter(await self.rank(shown))
        return [self._rewarded(0.0 if lost else next(scores)) for lost in failed]

    async def rank(self, trajectories: Sequence[Trajectory]) -> list[float]:
        count = len(trajectories)
        if count > MAX_CANDIDATES:
            raise ValueError(f"a judge ranks at most {MAX_CANDIDATES} at once, not {count}")
        if count < 2:
            return [1.0] * count
        found = await most_of([self._ranked(trajectories, number) for number in range(self.samples)])
        return [voted(self.vote, column) for column in zip(*found, strict=True)]

    async def _ranked(self, trajectories: Sequence[Trajectory], number: int) -> list[float]:
        count, verdict = len(trajectories), Ranking()
        turned = [(place + number) % count for place in range(count)]
        texts = [
            trajectory_text(trajectories[index], self.prompt.reasoning, prompt=False) for index in turned
        ]
        values = self.prompt.values(trajectories[0].task, candidates=texts)

        def read(text: str) -> list[float]:
            return verdict.read_all(text, count)

        scores = await self._ask(values, verdict.instruction, number, read)
        return [scores[turned.index(index)] for index in range(count)]


def _several(episodes: Sequence[Episode]) -> list[Trajectory]:
    if len(episodes) < 2:
        raise ValueError(
            "the judge compares the episodes of a group, and there is no other one to compare it with"
        )
    return [episode.trajectory for episode in episodes]
