"""Judges that score single episodes, compare pairs, or rank a whole group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from TrainingFactory.common.images import as_text
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import check_scorable
from TrainingFactory.rewards.judge.client import JudgeClient
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.judge.prompts import (
    SINGLE,
    FieldValue,
    ImageLabels,
    JudgePrompt,
    get_answer_text,
    make_boundary,
    show_trajectory,
)
from TrainingFactory.rewards.judge.verdicts import (
    MAX_CANDIDATES,
    PairwiseVerdict,
    RankingVerdict,
    Verdict,
    Vote,
    aggregate_scores,
)
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Message, Reward, ToolFailure, Trajectory

T = TypeVar("T")
CACHE_KEY_BOUNDARY = ""  # the fence boundary in cache keys, so that a random one does not change them


@dataclass(kw_only=True, eq=False)
class Judge:
    """Base of the judges: fills in the prompt and sends it to the judge model."""

    client: JudgeClient
    prompt: JudgePrompt
    samples: int = 1
    vote: Vote = "mean"
    name: str = "judge"
    judge_unfinished: bool = False
    fence_seed: int | None = None  # makes fences reproducible; None: random for every request
    num_unfinished: int = field(default=0, init=False)  # episodes that got the lowest score without a request

    @property
    def metrics(self) -> dict[str, float]:
        return self.client.usage.metrics("judge") | {"judge/unfinished": float(self.num_unfinished)}

    async def close(self) -> None:
        await self.client.close()

    def is_failed(self, trajectory: Trajectory) -> bool:
        """Return whether the episode fails without a request to the judge model: it did not finish, or it has neither
        an answer nor calls that the prompt shows. Count a failed episode in `num_unfinished`."""
        check_scorable(trajectory)
        shows_calls = self.prompt.slots != SINGLE or "conversation" in self.prompt.fields
        has_calls = shows_calls and any(turn.message.tool_calls for turn in trajectory.turns)
        is_empty = trajectory.status != "done" or not (get_answer_text(trajectory) or has_calls)
        is_failed = is_empty and not self.judge_unfinished
        self.num_unfinished += is_failed
        return is_failed

    async def _ask(
        self,
        field_texts: Mapping[str, FieldValue],
        instruction: str,
        sample_index: int,
        parse: Callable[[str], T],
        attach: Callable[[list[Message]], list[Message]] = lambda messages: messages,
    ) -> T:
        key = make_cache_key(attach(self.prompt.render(field_texts, instruction, CACHE_KEY_BOUNDARY)))

        def make_messages() -> list[Message]:  # rendered only if the reply is not cached
            return attach(self.prompt.render(field_texts, instruction, self._new_boundary(key, sample_index)))

        return await self.client.ask(key, make_messages, sample_index, parse)

    def _new_boundary(self, key: Sequence[str], sample_index: int) -> str:
        """Return a random fence boundary, or with `fence_seed` a digest that the prompt cannot contain."""
        if self.fence_seed is None:
            return make_boundary()
        return digest("fence", f"{self.fence_seed}", f"{sample_index}", *key)[: len(make_boundary())]

    async def _sample(
        self,
        field_texts: Mapping[str, FieldValue],
        instruction: str,
        parse: Callable[[str], float],
        trial: int,
        attach: Callable[[list[Message]], list[Message]] = lambda messages: messages,
    ) -> float:
        first_index = trial * self.samples
        indices = range(first_index, first_index + self.samples)
        requests = [self._ask(field_texts, instruction, index, parse, attach) for index in indices]
        return aggregate_scores(self.vote, await gather_majority(requests))

    def _make_reward(self, score: float) -> Reward:
        return Reward(score, parts={self.name: score})


def make_cache_key(messages: Sequence[Message]) -> list[str]:
    return [as_text(message.content, message.images, repr) for message in messages]


AskJudge = Callable[..., Coroutine[Any, Any, float]]  # `ModelJudge.ask_judge`


@runtime_checkable
class JudgePromptEnvironment(Protocol):
    """Interface of an environment that writes the judge's prompts itself."""

    async def ask_judge(self, episode: Episode, ask: AskJudge) -> Reward: ...


@dataclass(kw_only=True, eq=False)
class ModelJudge(Judge):
    """Judge that scores single episodes, with the environment's own prompt if it provides one."""

    verdict: Verdict
    images: int = 0  # the last images of the episode that the judge gets

    async def __call__(self, episode: Episode) -> Reward:
        trajectory = episode.trajectory
        if self.is_failed(trajectory):
            return self._make_reward(0.0)
        with suppress(ToolFailure):  # the environment is closed
            if isinstance(environment := episode.environment, JudgePromptEnvironment):
                return await environment.ask_judge(episode, self.ask_judge)
        return self._make_reward(await self.judge(trajectory))

    async def ask_judge(
        self, messages: Sequence[Message], parse: Callable[[str], float] | None = None
    ) -> float:
        """Send the messages to the judge model, and return the score that `parse` returns for its replies. If
        `parse` is None, add this judge's own instruction and parse its verdict."""
        if parse is None:
            prompt = replace(messages[-1], content=f"{messages[-1].content}\n\n{self.verdict.instruction}")
            messages, parse = [*messages[:-1], prompt], self.verdict.parse
        key = make_cache_key(messages)
        requests = [self.client.ask(key, lambda: messages, index, parse) for index in range(self.samples)]
        return aggregate_scores(self.vote, await gather_majority(requests))

    async def judge(self, trajectory: Trajectory, trial: int = 0) -> float:
        """Return the verdict, from 0 to 1. `trial` distinguishes repeated judgements of a trajectory in the cache."""
        image_labels = ImageLabels()
        field_texts = self.prompt.make_values(
            trajectory.task,
            conversation=show_trajectory(trajectory, self.prompt.reasoning, label=image_labels),
            answer=get_answer_text(trajectory),
        )
        attach = partial(image_labels.attach_last_images, self.images)
        return await self._sample(field_texts, self.verdict.instruction, self.verdict.parse, trial, attach)


@dataclass(kw_only=True, eq=False)
class PairJudge(Judge):
    """Judge whose reward is the share of comparisons that an episode wins. Every comparison is made in both orders, to
    cancel position bias. A failed episode loses against an episode with an answer, without a request to the judge
    model."""

    opponents: int | None = None  # compare with the next N episodes of the group; None: with all

    async def rate_pair(self, first: Trajectory, second: Trajectory, trial: int = 0) -> float:
        """Compare two episodes in this order only: return 1 if the first is better, 0 if the second is."""
        verdict = PairwiseVerdict()
        field_texts = self.prompt.make_values(
            first.task,
            first=show_trajectory(first, self.prompt.reasoning, prompt=False),
            second=show_trajectory(second, self.prompt.reasoning, prompt=False),
        )
        return await self._sample(field_texts, verdict.instruction, verdict.parse, trial)

    async def compare(self, first: Trajectory, second: Trajectory) -> float:
        """Compare two episodes in both orders: return 1 if the first is better, 0 if the second is."""
        forward, backward = await asyncio.gather(self.rate_pair(first, second), self.rate_pair(second, first))
        return (forward + 1 - backward) / 2

    async def __call__(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        """Return each episode's share of wins, or the failure if half or more of its comparisons failed. Raise if no
        episode has a share."""
        trajectories = _require_group(episodes)
        failed_flags = [self.is_failed(trajectory) for trajectory in trajectories]
        size = len(trajectories)
        offsets = range(1, min(self.opponents or size, size - 1) + 1)
        matches = ((first, (first + offset) % size) for first in range(size) for offset in offsets)
        pairs = sorted({(min(pair), max(pair)) for pair in matches})

        async def compare(first: int, second: int) -> float:
            if failed_flags[first] or failed_flags[second]:
                return 0.5 * (1 + failed_flags[second] - failed_flags[first])
            return await self.compare(trajectories[first], trajectories[second])

        verdicts = await asyncio.gather(*(compare(*pair) for pair in pairs), return_exceptions=True)
        win_scores: list[list[float | BaseException]] = [[] for _ in trajectories]
        for (first, second), verdict in zip(pairs, verdicts, strict=True):
            win_scores[first].append(verdict)
            win_scores[second].append(verdict if isinstance(verdict, BaseException) else 1 - verdict)
        rewards = [self._make_win_reward(comparisons) for comparisons in win_scores]
        if all(isinstance(reward, Exception) for reward in rewards):
            require_majority(win_scores[0])  # raises the first failure
        return rewards

    def _make_win_reward(self, win_scores: Sequence[float | BaseException]) -> Reward | Exception:
        try:
            scores = require_majority(win_scores)
        except JudgeFailure as failure:
            return failure
        return self._make_reward(sum(scores) / len(scores))


@dataclass(kw_only=True, eq=False)
class RankingJudge(Judge):
    """Judge that ranks a whole group. Every sample shows the candidates in a rotated order. Failed episodes get 0 and
    are not shown."""

    async def __call__(self, episodes: Sequence[Episode]) -> list[Reward]:
        trajectories = _require_group(episodes)
        failed_flags = [self.is_failed(trajectory) for trajectory in trajectories]
        candidates = [
            trajectory
            for trajectory, is_failed in zip(trajectories, failed_flags, strict=True)
            if not is_failed
        ]
        scores = iter(await self.rank(candidates))
        return [self._make_reward(0.0 if is_failed else next(scores)) for is_failed in failed_flags]

    async def rank(self, trajectories: Sequence[Trajectory]) -> list[float]:
        num_episodes = len(trajectories)
        if num_episodes > MAX_CANDIDATES:
            raise ValueError(f"a judge ranks at most {MAX_CANDIDATES} episodes; the group has {num_episodes}")
        if num_episodes < 2:
            return [1.0] * num_episodes
        rankings = await gather_majority(
            [self._rank_once(trajectories, sample_index) for sample_index in range(self.samples)]
        )
        return [aggregate_scores(self.vote, column) for column in zip(*rankings, strict=True)]

    async def _rank_once(self, trajectories: Sequence[Trajectory], sample_index: int) -> list[float]:
        num_candidates = len(trajectories)
        verdict = RankingVerdict()
        order = [(offset + sample_index) % num_candidates for offset in range(num_candidates)]
        texts = [show_trajectory(trajectories[index], self.prompt.reasoning, prompt=False) for index in order]
        field_texts = self.prompt.make_values(trajectories[0].task, candidates=texts)

        def parse(reply: str) -> list[float]:
            return verdict.parse_all(reply, num_candidates)

        scores = await self._ask(field_texts, verdict.instruction, sample_index, parse)
        return [scores[order.index(index)] for index in range(num_candidates)]


def _require_group(episodes: Sequence[Episode]) -> list[Trajectory]:
    if len(episodes) < 2:
        raise ValueError("the judge compares the episodes of a group and needs at least 2; raise group_size")
    return [episode.trajectory for episode in episodes]


async def gather_majority(requests: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return require_majority(await asyncio.gather(*requests, return_exceptions=True))


def require_majority(results: Sequence[T | BaseException]) -> list[T]:
    """Return the successes if they are more than half; else raise the first JudgeFailure. Always raise exceptions of
    other types."""
    successes = [result for result in results if not isinstance(result, BaseException)]
    lacks_majority = 2 * len(successes) <= len(results)
    for error in results:
        if isinstance(error, BaseException) and (lacks_majority or not isinstance(error, JudgeFailure)):
            raise error
    return successes
