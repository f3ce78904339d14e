"""Rules that compare the number which the answer states."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.options import STRICT, NotNegative
from TrainingFactory.rewards.rules.answers import AnswerRule
from TrainingFactory.rewards.rules.numbers import Number, is_number, only_number, same_number
from TrainingFactory.rewards.rules.text import holds, normalised


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
        if text and (_ZEROS_IN_FRONT.fullmatch(text) or not self._is_number(text)):
            return text
        if isinstance(reference, bool | dict):
            return str(reference)
        return super().read_reference(reference)

    def _is_number(self, text: str) -> bool:
        return is_number(text) or (self.decimal_comma and is_number(text, True))

    def score(self, answer: str, reference: Any) -> float:
        if not isinstance(reference, str):
            return super().score(answer, reference)
        if _ZEROS_IN_FRONT.fullmatch(reference) and (number := only_number(answer)):
            return float(number.value == int(reference) and holds(answer, reference))
        return float(normalised(answer) == normalised(reference))


_ZEROS_IN_FRONT = re.compile(r"0\d{1,99}")
