"""The rule of mathematical answers: numbers as numeric compares them, all else by the package math-verify, in a worker
process, because a few characters can stand for a number or a polynomial without end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.options import STRICT, Count
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.rules.answers import ReferenceRule
from TrainingFactory.rewards.rules.numbers import is_number, only_number, same_number
from TrainingFactory.rewards.rules.text import normalised
from TrainingFactory.types import Reward
from TrainingFactory.workers import Worker, WorkerTooSlow

MAX_CHARS = 300  # of a formula; what is longer is no answer
MAX_BYTES = 4 * 2**30  # of memory; a formula that needs more has no value


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Maths(ReferenceRule):
    """The same mathematical object: sets, intervals, roots, expressions. A formula that math-verify cannot read,
    simplify or compare within `timeout` seconds each is wrong."""

    rule: ClassVar[str] = "math"
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
        return Worker(f"{__name__}:comparing", self.timeout)

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


def comparing(seconds: int) -> Callable[[tuple[str, str]], bool | None]:
    """Return the function that answers in the worker process; each of its steps may take so many seconds."""
    import resource

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()  # math-verify tells each formula that takes too long
    with suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))

    def same(formulas: tuple[str, str]) -> bool | None:
        """Compare the right formula with the given one; None if the right one cannot be read."""
        # Only LaTeX: the reader of plain expressions hands its text to Python.
        right, given = (
            parse(f"${text.strip().strip('$')}$", [LatexExtractionConfig()], parsing_timeout=seconds)
            for text in formulas
        )
        return bool(given) and verify(right, given, timeout_seconds=seconds) if right else None

    return same
