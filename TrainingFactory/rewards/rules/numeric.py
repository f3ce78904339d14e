"""Rules that compare numbers and formulas. Math-verify compares formulas in a worker process, because a few characters
can expand to a huge polynomial."""

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
from TrainingFactory.rewards.rules.numbers import Number, is_number, is_same_number, parse_only_number
from TrainingFactory.rewards.rules.text import contains_words, normalise_text
from TrainingFactory.types import Reward

MAX_FORMULA_CHARS = 300  # longer formulas do not match
MAX_BYTES = 4 * 2**30  # memory limit of the worker process


@dataclass(config=STRICT, frozen=True, kw_only=True)
class NumericRule(AnswerRule):
    """Reward an answer that states exactly one number, equal to the reference up to `tolerance` (absolute) or
    `relative` (a share of it), whichever is larger. Default: integers must be equal, others within a relative 1e-6."""

    rule: ClassVar[str] = "numeric"
    tolerance: NotNegative | None = None
    relative: NotNegative | None = None
    decimal_comma: bool = False  # 1.234,5 and 3,14 as in most of Europe, also in references that are strings

    def parse_reference(self, reference: Any) -> Any:
        number = as_number(reference, self.decimal_comma)
        if number is None:
            raise ValueError(f"its answer {str(reference)[:60]!r} is not one number; correct it")
        return number

    def score(self, answer: str, reference: Any) -> float:
        number = parse_only_number(answer, self.decimal_comma)
        return float(number is not None and is_same_number(number, reference, self.tolerance, self.relative))


def as_number(reference: Any, decimal_comma: bool = False) -> Number | None:
    """Parse a reference: a number, a text that states one, or a worked solution that ends in `#### 72`; None for
    others. With `decimal_comma`, 1.234 is 1234, but 3.14 is still 3.14."""
    if isinstance(reference, int | Fraction | Decimal | float) and not isinstance(reference, bool):
        if isinstance(reference, Decimal | float) and not math.isfinite(reference):
            raise ValueError(f"its answer is {reference}; it must be a finite number")
        return Number(Fraction(str(reference)))
    if not isinstance(reference, str):
        return None
    text = reference.rpartition("####")[2]
    return (parse_only_number(text, True) if decimal_comma else None) or parse_only_number(text)


@dataclass(config=STRICT, frozen=True, kw_only=True)
class AutoRule(NumericRule):
    """Compare like `numeric` if the reference is a number, else like `normalised`. A reference with leading zeros
    (02139) is not a number: the answer must have them too."""

    rule: ClassVar[str] = "auto"

    def parse_reference(self, reference: Any) -> Any:
        text = reference.rpartition("####")[2].strip() if isinstance(reference, str) else ""
        is_numeric = is_number(text) or (self.decimal_comma and is_number(text, True))
        if text and (_LEADING_ZEROS.fullmatch(text) or not is_numeric):
            return text
        if isinstance(reference, bool | dict):
            return str(reference)
        return super().parse_reference(reference)

    def score(self, answer: str, reference: Any) -> float:
        if not isinstance(reference, str):
            return super().score(answer, reference)
        if _LEADING_ZEROS.fullmatch(reference) and (number := parse_only_number(answer)):
            return float(number.value == int(reference) and contains_words(answer, reference))
        return float(normalise_text(answer) == normalise_text(reference))


_LEADING_ZEROS = re.compile(r"0\d{1,99}")


@dataclass(config=STRICT, frozen=True, kw_only=True)
class MathRule(ReferenceRule):
    """Reward a mathematically equal answer. An answer that takes over `timeout` seconds to parse or compare scores
    0."""

    rule: ClassVar[str] = "math"
    timeout: Count = 3

    def __post_init__(self) -> None:
        if find_spec("math_verify") is None:
            raise ValueError(
                "the rule math needs the package math-verify, which is not installed; run pip install math-verify, or "
                "use the rule numeric or normalised"
            )

    @cached_property
    def _worker(self) -> Worker:
        return Worker(f"{__name__}:make_comparer", self.timeout)

    async def close(self) -> None:
        """End the worker process; the next comparison starts a new one."""
        if (worker := self.__dict__.pop("_worker", None)) is not None:
            await worker.close()

    async def __call__(self, episode: Episode) -> Reward:
        references = self.parse_references(episode)
        for answer in self.extract_candidates(episode):
            for reference in references:
                if await self._is_equal(answer, reference):
                    return self.make_reward(1.0)
        return self.make_reward(0.0)

    def parse_reference(self, reference: Any) -> str:
        return str(reference).rpartition("####")[2].strip()

    async def _is_equal(self, answer: str, reference: str) -> bool:
        number, expected_number = parse_only_number(answer), parse_only_number(reference)
        if number is not None and expected_number is not None and is_number(reference):
            return is_same_number(number, expected_number)
        if normalise_text(answer) == normalise_text(reference):
            return True
        if len(answer) > MAX_FORMULA_CHARS:
            return False
        try:
            are_equal = await self._worker.ask([reference, answer], timeout=10 * self.timeout)
        except WorkerTooSlow:  # math-verify's own timeouts cannot interrupt every operation
            return False
        if are_equal is None:
            raise ValueError(f"math-verify cannot parse the reference answer {reference[:60]!r}; correct it")
        return are_equal


def make_comparer(timeout_seconds: int) -> Callable[[tuple[str, str]], bool | None]:
    """Return the worker process's comparison function, which may take `timeout_seconds` to parse and to compare."""
    import resource

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()  # math-verify logs every timeout
    with suppress(ValueError, OSError):  # not supported on every system
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))

    def are_equal(formulas: tuple[str, str]) -> bool | None:
        """Return whether the two formulas, reference and answer, are equal; None if the reference cannot be parsed."""
        # Only LaTeX, because the parser of plain expressions evaluates its text as Python.
        reference, answer = (
            parse(f"${text.strip().strip('$')}$", [LatexExtractionConfig()], parsing_timeout=timeout_seconds)
            for text in formulas
        )
        if not reference:
            return None
        return bool(answer) and verify(reference, answer, timeout_seconds=timeout_seconds)

    return are_equal
