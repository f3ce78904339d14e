"""Judges: of every episode by itself, of two at a time, of a whole group at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import check_known
from TrainingFactory.rewards.judge.client import JudgeClient
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.judge.prompts import (
    SINGLE,
    JudgePrompt,
    Shown,
    answer_text,
    new_boundary,
    trajectory_text,
)
from TrainingFactory.rewards.judge.verdicts import MAX_CANDIDATES, Pairwise, Ranking, Verdict, Vote, voted
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Message, Reward, ToolFailure, Trajectory

T = TypeVar("T")
KEYED = ""  # the boundary in what a prompt is known by in the cache


@dataclass(kw_only=True, eq=False)
class Judge:
    """Ask a client about what its prompt shows."""

    client: JudgeClient
    prompt: JudgePrompt
    samples: int = 1
    vote: Vote = "mean"
    name: str = "judge"
    judge_unfinished: bool = False
    fence_seed: int | None = None  # fences are the same in every run; None: drawn anew for every request
    unfinished: int = field(default=0, init=False)  # episodes that got the lowest score without asking

    @property
    def metrics(self) -> dict[str, float]:
        """Return requests, tokens, cost and failures so far."""
        return self.client.usage.metrics | {"judge/unfinished": float(self.unfinished)}

    async def close(self) -> None:
        await self.client.close()

    def failed(self, trajectory: Trajectory) -> bool:
        """Tell whether there is nothing to judge: no end of its own, or one without a word or calls that are shown."""
        check_known(trajectory)
        shows_calls = self.prompt.kind != SINGLE or "conversation" in self.prompt.fields
        acted = shows_calls and any(turn.message.tool_calls for turn in trajectory.turns)
        nothing = trajectory.status != "done" or not (answer_text(trajectory) or acted)
        failed = nothing and not self.judge_unfinished
        self.unfinished += failed
        return failed

    async def _ask(
        self, values: Mapping[str, Shown], instruction: str, number: int, read: Callable[[str], T]
    ) -> T:
        known = [message.content for message in self.prompt.messages(values, instruction, KEYED)]

        def messages() -> list[Message]:  # not made for what is in the cache
            return self.prompt.messages(values, instruction, self._boundary(known, number))

        return await self.client.ask(known, messages, number, read)

    def _boundary(self, known: Sequence[str], number: int) -> str:
        """Return a random one, or a digest of the whole prompt, which no text in it could hold."""
        if self.fence_seed is None:
            return new_boundary()
        return digest("fence", f"{self.fence_seed}", f"{number}", *known)[: len(new_boundary())]

    async def _samples(
        self, values: Mapping[str, Shown], instruction: str, read: Callable[[str], float], repeat: int
    ) -> float:
        first = repeat * self.samples
        numbers = range(first, first + self.samples)
        return voted(
            self.vote, await most_of([self._ask(values, instruction, number, read) for number in numbers])
        )

    def _rewarded(self, value: float) -> Reward:
        return Reward(value, parts={self.name: value})


Ask = Callable[..., Coroutine[Any, Any, float]]  # `ModelJudge.put`


@runtime_checkable
class AsksJudge(Protocol):
    """An environment that writes the judge's prompts itself."""

    async def ask_judge(self, episode: Episode, ask: Ask) -> Reward: ...


@dataclass(kw_only=True, eq=False)
class ModelJudge(Judge):
    """Judge every episode by itself, by the environment's own prompt where that is open and writes one."""

    verdict: Verdict

    async def __call__(self, episode: Episode) -> Reward:
        trajectory = episode.trajectory
        if self.failed(trajectory):
            return self._rewarded(0.0)
        with suppress(ToolFailure):  # closed long ago
            if isinstance(environment := episode.environment, AsksJudge):
                return await environment.ask_judge(episode, self.put)
        return self._rewarded(await self.judge(trajectory))

    async def put(self, messages: Sequence[Message], read: Callable[[str], float] | None = None) -> float:
        """Return what `read` makes of the reply to these messages; None: this judge's verdict, for which they ask."""
        if read is None:
            last = replace(messages[-1], content=f"{messages[-1].content}\n\n{self.verdict.instruction}")
            messages, read = [*messages[:-1], last], self.verdict.read
        known = [message.content for message in messages]
        numbers = range(self.samples)
        asked = [self.client.ask(known, lambda: messages, number, read) for number in numbers]
        return voted(self.vote, await most_of(asked))

    async def judge(self, trajectory: Trajectory, repeat: int = 0) -> float:
        """Return the verdict, from 0 to 1. `repeat` tells judgements of one trajectory apart in the cache."""
        values = self.prompt.values(
            trajectory.task,
            conversation=trajectory_text(trajectory, self.prompt.reasoning),
            answer=answer_text(trajectory),
        )
        return await self._samples(values, self.verdict.instruction, self.verdict.read, repeat)


@dataclass(kw_only=True, eq=False)
class PairJudge(Judge):
    """Reward the share of comparisons that an episode wins, each in both orders, so that the place of a text cannot
    decide. Who has no answer loses against who has one, without asking."""

    opponents: int | None = None  # against so many of the next ones; None: all

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
        """Return each episode's share, or why it has less than half of its comparisons; raise where none has them."""
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
    """Let the judge order a whole group. With several samples every candidate stands in another place each time.
    Episodes without an answer get 0 and are not shown."""

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


async def most_of(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return more_than_half(await asyncio.gather(*asked, return_exceptions=True))


def more_than_half(found: Sequence[T | BaseException]) -> list[T]:
    """Return what could be had, if that is more than half of it; else raise the first failure."""
    had = [each for each in found if not isinstance(each, BaseException)]
    for error in found:
        if isinstance(error, BaseException) and (
            not isinstance(error, JudgeFailure) or 2 * len(had) <= len(found)
        ):
            raise error
    return had
