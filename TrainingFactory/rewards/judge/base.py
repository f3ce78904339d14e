"""The part that all judges share: the request, the vote over several samples, what counts as an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from TrainingFactory.rewards.adapt import check_known
from TrainingFactory.rewards.judge.client import JudgeClient
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.judge.prompts import SINGLE, JudgePrompt, Shown, answer_text, new_boundary
from TrainingFactory.rewards.judge.verdicts import Vote, voted
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.types import Message, Reward, Trajectory

T = TypeVar("T")
KEYED = ""  # the boundary in what a prompt is known by in the cache


@dataclass(kw_only=True, eq=False)
class Judge:
    """Asks a client about what its prompt shows. `fence_seed`: the fences around texts are the same in every run, and
    with them what a deterministic model answers; None: drawn anew for every request."""

    client: JudgeClient
    prompt: JudgePrompt
    samples: int = 1
    vote: Vote = "mean"
    name: str = "judge"
    judge_unfinished: bool = False
    fence_seed: int | None = None
    unfinished: int = field(default=0, init=False)  # episodes that got the lowest score without asking

    @property
    def metrics(self) -> dict[str, float]:
        """Return requests, tokens, cost and failures so far."""
        return self.client.usage.metrics | {"judge/unfinished": float(self.unfinished)}

    async def check(self) -> None:
        """Raise if the judge is out of reach; costs nothing."""
        await self.client.model.check()

    async def close(self) -> None:
        await self.client.close()

    def failed(self, trajectory: Trajectory) -> bool:
        """Tell whether there is nothing to judge: no end of its own, or one without a word, unless the judge is shown
        what was done by calls. Raise for an episode of which nothing is known."""
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
        """Return a random one, or a digest of the seed and the whole prompt: another one for every text that is
        judged, so that there is none to learn, and none that a text could hold: it would have to hold a digest of
        itself."""
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
