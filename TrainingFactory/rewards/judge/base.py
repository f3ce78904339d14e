"""What all judges share: the request, the vote over several samples, what counts as an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from TrainingFactory.rewards.checks import check_flag, check_text
from TrainingFactory.rewards.judge.client import JudgeClient
from TrainingFactory.rewards.judge.endpoints import JudgeFailure, Reply
from TrainingFactory.rewards.judge.prompts import (
    SINGLE,
    JudgePrompt,
    Shown,
    answer_text,
    fields_of,
    new_boundary,
)
from TrainingFactory.rewards.judge.verdicts import check_vote, voted
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Message, Reward, Trajectory

T = TypeVar("T")
KEYED = ""  # the boundary in what a prompt is known by in the cache


@dataclass(slots=True, frozen=True)
class Judgement:
    """`value` is from 0 to 1; `values` are those of the samples that could be read."""

    value: float
    values: list[float]


class Judge:
    """What all judges share. `fence_seed`: the fences around texts are the same in every run, and with them what a
    deterministic model answers; None: drawn anew for every request."""

    kind = SINGLE

    def __init__(
        self,
        client: JudgeClient,
        prompt: JudgePrompt | None = None,
        *,
        samples: int = 1,
        vote: str = "mean",
        name: str = "judge",
        judge_unfinished: bool = False,
        fence_seed: int | None = None,
    ) -> None:
        check_vote(vote, samples)
        check_text("name", name)
        check_flag("judge_unfinished", judge_unfinished)
        if fence_seed is not None and (isinstance(fence_seed, bool) or not isinstance(fence_seed, int)):
            raise ValueError(f"fence_seed is {fence_seed!r}; it must be a whole number, or null")
        self.client, self.prompt = client, prompt or JudgePrompt(kind=self.kind)
        if self.prompt.kind != self.kind:
            raise ValueError(f"{type(self).__name__} needs a prompt with the fields {', '.join(self.kind)}")
        self.samples, self.vote, self.name, self.judge_unfinished = samples, vote, name, judge_unfinished
        self.fence_seed = fence_seed
        self.unfinished = 0  # episodes that were given the lowest score without asking

    @property
    def figures(self) -> dict[str, float]:
        """Requests, tokens, cost and failures so far, for the log."""
        return self.client.usage.figures() | {"judge/unfinished": float(self.unfinished)}

    async def check(self) -> None:
        """Raises where the judge is out of reach; costs nothing."""
        await self.client.model.check()

    def close(self) -> None:
        self.client.close()

    def failed(self, trajectory: Trajectory) -> bool:
        """Whether there is nothing to judge: no end of its own, or one without a word, unless the judge is shown what
        was done by calls. Raises for an episode of which nothing is known."""
        if trajectory.status in ("error", "tool_failure"):
            raise ValueError(
                f"the episode ended with status {trajectory.status}: what it is worth is not known"
            )
        shows_calls = self.kind != SINGLE or "conversation" in fields_of(self.prompt.template)
        acted = shows_calls and any(turn.message.tool_calls for turn in trajectory.turns)
        nothing = trajectory.status != "done" or not (answer_text(trajectory) or acted)
        failed = nothing and not self.judge_unfinished
        self.unfinished += failed
        return failed

    async def _ask(
        self, values: Mapping[str, Shown], instruction: str, number: int, read: Callable[[str], T]
    ) -> tuple[T, Reply]:
        known = [message.content for message in self.prompt.messages(values, instruction, KEYED)]

        def messages() -> list[Message]:  # not made for what is in the cache
            return self.prompt.messages(values, instruction, self._boundary(known, number))

        return await self.client.ask(known, messages, number, read)

    def _boundary(self, known: Sequence[str], number: int) -> str:
        """Random, or a digest of the seed and the whole prompt: another one for every text that is judged, so that
        there is none to learn, and none that a text could hold, since it would have to hold a digest of itself."""
        if self.fence_seed is None:
            return new_boundary()
        return digest("fence", f"{self.fence_seed}", f"{number}", *known)[: len(new_boundary())]

    async def _samples(
        self, values: Mapping[str, Shown], instruction: str, read: Callable[[str], float], repeat: int
    ) -> Judgement:
        first = repeat * self.samples
        asked = [self._ask(values, instruction, first + number, read) for number in range(self.samples)]
        found = await most_of(asked)
        read_values = [value for value, _ in found]
        return Judgement(voted(self.vote, read_values), read_values)

    def _paid(self, value: float) -> Reward:
        return Reward(value, parts={self.name: value})


async def most_of(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return more_than_half(await asyncio.gather(*asked, return_exceptions=True))


def more_than_half(found: Sequence[T | BaseException]) -> list[T]:
    """What could be had, if that is more than half of it; else the first failure is raised."""
    had = [each for each in found if not isinstance(each, BaseException)]
    for error in found:
        if isinstance(error, BaseException) and (
            not isinstance(error, JudgeFailure) or 2 * len(had) <= len(found)
        ):
            raise error
    return had
