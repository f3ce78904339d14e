"""Rules that compare numbers, and formulas: a few characters can stand for a polynomial without end, so math-verify
compares these in a worker process."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, Count, NotNegative
from TrainingFactory.common.workers import Worker, WorkerTooSlow
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.rules.answers import AnswerRule, ReferenceRule
from TrainingFactory.rewards.rules.numbers import Number, is_number, only_number, same_number
from TrainingFactory.rewards.rules.text import holds, normalised
from TrainingFactory.types import Reward

MAX_FORMULA_CHARS = 300  # of a formula; what is longer is no answer
MAX_BYTES = 4 * 2**30  # of memory; a formula that needs more has no value


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Numeric(AnswerRule):
    """Reward the same number, of which the answer must state exactly one. `tolerance` is absolute, `relative` a share
    of the right one; the larger counts. Without them whole numbers must be equal, others within 1e-6."""

    rule: ClassVar[str] = "numeric"
    tolerance: NotNegative | None = None
    relative: NotNegative | None = None
    decimal_comma: bool = False  # 1.234,5 and 3,14 as in most of Europe, also in right answers that are texts

    def read_reference(self, reference: Any) -> Any:
        number = as_number(reference, self.decimal_comma)
        if number is None:
            raise ValueError(
                f"its answer {str(reference)[:60]!r} is not one number, so numeric cannot compare with it"
            )
        return number

    def score(self, answer: str, reference: Any) -> float:
        number = only_number(answer, self.decimal_comma)
        return float(number is not None and same_number(number, reference, self.tolerance, self.relative))


def as_number(reference: Any, decimal_comma: bool = False) -> Number | None:
    """Read a right answer: a number, a text that states one, or a worked solution that ends in `#### 72`. With
    `decimal_comma` 1.234 is 1234, and 3.14, which cannot be read so, is what it is elsewhere."""
    if isinstance(reference, int | Fraction | Decimal | float) and not isinstance(reference, bool):
        if isinstance(reference, Decimal | float) and not math.isfinite(reference):
            raise ValueError(f"its answer is {reference}, which nothing can be compared with")
        return Number(Fraction(str(reference)))
    if not isinstance(reference, str):
        return None
    text = reference.rpartition("####")[2]
    return (only_number(text, True) if decimal_comma else None) or only_number(text)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Auto(Numeric):
    """Compare as numeric where the right answer is a number, else as normalised. One with zeros in front (02139) is no
    number: it must be given with them."""

    rule: ClassVar[str] = "auto"

    def read_reference(self, reference: Any) -> Any:
        text = reference.rpartition("####")[2].strip() if isinstance(reference, str) else ""
        number = is_number(text) or (self.decimal_comma and is_number(text, True))
        if text and (_ZEROS_IN_FRONT.fullmatch(text) or not number):
            return text
        if isinstance(reference, bool | dict):
            return str(reference)
        return super().read_reference(reference)

    def score(self, answer: str, reference: Any) -> float:
        if not isinstance(reference, str):
            return super().score(answer, reference)
        if _ZEROS_IN_FRONT.fullmatch(reference) and (number := only_number(answer)):
            return float(number.value == int(reference) and holds(answer, reference))
        return float(normalised(answer) == normalised(reference))


_ZEROS_IN_FRONT = re.compile(r"0\d{1,99}")


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Maths(ReferenceRule):
    """Reward the same mathematical object. What takes longer than `timeout` seconds to read or compare is wrong."""

    rule: ClassVar[str] = "math"
    timeout: Count = 3

    def __post_init__(self) -> None:
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
        if len(answer) > MAX_FORMULA_CHARS:
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
