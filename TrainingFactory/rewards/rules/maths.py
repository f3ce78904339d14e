"""The rule of mathematical answers, by the package math-verify."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.options import STRICT
from TrainingFactory.rewards.rules.base import AnswerRule
from TrainingFactory.rewards.rules.formulas import endless
from TrainingFactory.rewards.rules.numbers import is_number, same_number
from TrainingFactory.rewards.rules.statements import only_number
from TrainingFactory.rewards.rules.wording import normalised


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Maths(AnswerRule):
    """The same mathematical object, by the package math-verify: sets, intervals, roots, expressions. Numbers are
    compared as numeric does."""

    rule: ClassVar[str] = "math"
    reads_numbers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            import_module("math_verify")
        except ImportError as error:
            raise ValueError(
                "the rule math needs the package math-verify, which is not installed: pip install math-verify "
                "(the rules numeric and normalised need nothing)"
            ) from error

    def read_reference(self, reference: Any) -> str:
        return str(reference).rpartition("####")[2].strip()

    def score(self, answer: str, reference: str) -> float:
        given, right = only_number(answer), only_number(reference)
        if given is not None and right is not None and is_number(reference):
            return float(same_number(given, right))
        if normalised(answer) == normalised(reference):
            return 1.0
        if endless(answer):
            return 0.0
        maths = import_module("math_verify")
        # Only LaTeX: the reader of plain expressions hands its text to Python. No time-outs: theirs are signals, which
        # threads cannot have; what could run for ever was refused above.
        reader = [maths.LatexExtractionConfig()]
        sides = [
            maths.parse(f"${text.strip().strip('$')}$", reader, parsing_timeout=None)
            for text in (reference, answer)
        ]
        if not sides[0]:
            raise ValueError(f"math-verify cannot read the right answer {reference[:60]!r}")
        return float(bool(sides[1]) and maths.verify(*sides, timeout_seconds=None))
