"""The rule of mathematical answers: numbers as numeric compares them, all else by the package math-verify."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.options import STRICT, Count
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.rules.base import ReferenceRule
from TrainingFactory.rewards.rules.numbers import is_number, same_number
from TrainingFactory.rewards.rules.statements import only_number
from TrainingFactory.rewards.rules.wording import normalised
from TrainingFactory.types import Reward
from TrainingFactory.workers import Worker, WorkerTooSlow

MAX_CHARS = 300  # of a formula; what is longer is no answer


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Maths(ReferenceRule):
    """The same mathematical object: sets, intervals, roots, expressions. A formula that math-verify cannot read,
    simplify or compare within `timeout` seconds each is wrong."""

    rule: ClassVar[str] = "math"
    reads_numbers: ClassVar[bool] = True
    timeout: Count = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("math_verify") is None:
            raise ValueError(
                "the rule math needs the package math-verify, which is not installed: pip install math-verify "
                "(the rules numeric and normalised need nothing)"
            )

    @cached_property
    def _worker(self) -> Worker:
        return Worker(f"{__package__}.formulas:comparing", self.timeout)

    async def close(self) -> None:
        """End the process; the next question starts another."""
        if (worker := self.__dict__.pop("_worker", None)) is not None:
            await worker.close()

    async def __call__(self, episode: Episode) -> Reward:
        right = self.right_answers(episode)
        for answer in self.answers_of(episode):
            for reference in right:
                if await self._same(answer, reference):
                    return self.rewarded(1.0)
        return self.rewarded(0.0)

    def read_reference(self, reference: Any) -> str:
        return str(reference).rpartition("####")[2].strip()

    async def _same(self, answer: str, reference: str) -> bool:
        given, right = only_number(answer), only_number(reference)
        if given is not None and right is not None and is_number(reference):
            return same_number(given, right)
        if normalised(answer) == normalised(reference):
            return True
        if len(answer) > MAX_CHARS:
            return False
        try:
            same = await self._worker.ask([reference, answer], seconds=10 * self.timeout)
        except WorkerTooSlow:  # a step of the interpreter's that nothing could break off
            return False
        if same is None:
            raise ValueError(f"math-verify cannot read the right answer {reference[:60]!r}")
        return same
