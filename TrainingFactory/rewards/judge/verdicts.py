"""The form in which a judge has to answer, and how it is read. Raises JudgeFailure for what is not certain."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from statistics import mean, median
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, Text, make_from
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.rules.answers import without_reasoning
from TrainingFactory.rewards.rules.json_answers import checked_schema, strict_json
from TrainingFactory.tools.schema import validator_of

Vote = Literal["mean", "majority", "median"]
MAX_CANDIDATES = len(string.ascii_uppercase)
NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|[+-]?nan|[+-]?inf(?:inity)?"
SCORE = re.compile(rf"({NUMBER})(?: ?/ ?(\d+(?:\.\d+)?))?")
MARKUP = " \t*_`"  # of emphasis and code, around a verdict
FENCE = "```"
LARGE = 1e300  # a whole number beyond it may be too large for a float


class Verdict(Protocol):
    """Read the verdict on one text as a number from 0 (bad) to 1 (good)."""

    @property
    def instruction(self) -> str: ...
    def read(self, text: str) -> float: ...


@dataclass(config=STRICT, frozen=True)
class Score:
    """Read a number from `low` to `high`, mapped to 0 to 1."""

    low: float = 0.0
    high: float = 10.0

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}; low must be below high")

    @property
    def instruction(self) -> str:
        return (
            f"Give a score from {self.low:g} (worst) to {self.high:g} (best). End with one line of the form\n"
            "Score: NUMBER"
        )

    def read(self, text: str) -> float:
        found = SCORE.fullmatch(final_line(text, "score"))
        if found is None:
            raise without_line(text, "score")
        value, out_of = found.groups()
        if out_of and float(out_of) != self.high:
            raise JudgeFailure(f"the judge's score is out of {out_of}, not {self.high:g}", "out_of_range")
        return self.scaled(float(value))

    def scaled(self, value: float) -> float:
        if not self.low <= value <= self.high:  # nor for nan
            raise JudgeFailure(
                f"the judge's score is {value:g}; it must be from {self.low:g} to {self.high:g}",
                "out_of_range",
            )
        return (value - self.low) / (self.high - self.low)


@dataclass(config=STRICT, frozen=True)
class YesNo:
    instruction: ClassVar[str] = "End with one line that is either\nVerdict: yes\nor\nVerdict: no"

    def read(self, text: str) -> float:
        return one_of(text, "verdict", {"yes": 1.0, "no": 0.0})


@dataclass(config=STRICT)
class JsonVerdict:
    """Read an object of `schema`, whose `key` is a truth value, a number from `low` to `high` (or in the schema's own
    range), or one of `values`, which stand for such numbers."""

    schema: Annotated[dict[str, Any], AfterValidator(checked_schema)]
    key: Text = "score"
    low: float = 0.0
    high: float = 1.0
    values: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.key not in self.schema.get("properties", {}):
            raise ValueError(f"key is {self.key!r}, which is not among the properties of schema")
        low, high = self.scale.low, self.scale.high
        for name, value in self.values.items():
            if not low <= value <= high:
                raise ValueError(f"values.{name} is {value:g}; it must be between {low:g} and {high:g}")

    @cached_property
    def scale(self) -> Score:
        """Return the range, worst to best: the schema's own, else that of the options."""
        low, high = self._about.get("minimum", self.low), self._about.get("maximum", self.high)
        return make_from(Score, {"low": low, "high": high}, "the range")

    @property
    def _about(self) -> dict[str, Any]:
        about = self.schema["properties"][self.key]
        return about if isinstance(about, dict) else {}  # a schema may be true

    @property
    def instruction(self) -> str:
        numeric = self._about.get("type") in ("number", "integer")
        low, high = self.scale.low, self.scale.high
        told = f" {self.key} is from {low:g} (worst) to {high:g} (best)." if numeric else ""
        return (
            f"Answer with one JSON object of this schema and nothing else.{told}\n{json.dumps(self.schema)}"
        )

    def read(self, text: str) -> float:
        value = strict_json(self._verdict_in(without_reasoning(text).strip()))
        if not isinstance(value, dict):
            raise unreadable(text, "one JSON object")
        try:
            fits = validator_of(self.schema).is_valid(value)
        except (OverflowError, RecursionError):  # a number or a depth that cannot be checked
            fits = False
        if not fits or self.key not in value:
            raise unreadable(text, f"an object of the schema with the key {self.key}")
        found = value[self.key]
        if isinstance(found, bool):
            return float(found)
        if isinstance(found, str) and found in self.values:
            found = self.values[found]
        if not isinstance(found, int | float):
            raise unreadable(text, f"a number under {self.key}")
        return self.scale.scaled(found if abs(found) < LARGE else math.inf)

    def _verdict_in(self, text: str) -> str:
        """Return all of the text, or the fenced block that it ends with, if nothing before it looks like another."""
        before, fence, block = text.removesuffix(FENCE).rpartition(FENCE)
        if not fence or not text.endswith(FENCE):
            return text
        language, _, inside = block.partition("\n")
        return "" if json.dumps(self.key) in before else inside if language.strip().isalnum() else block


@dataclass(config=STRICT, frozen=True)
class Pairwise:
    """Read which of two is better: 1 if A is, 0 if B is, 0.5 for a tie."""

    instruction: ClassVar[str] = (
        "Say which of the two is better, A or B; the order in which they stand means nothing. End with one line that "
        "is one of\nWinner: A\nWinner: B\nWinner: tie"
    )

    def read(self, text: str) -> float:
        return one_of(text, "winner", {"a": 1.0, "b": 0.0, "tie": 0.5})


@dataclass(config=STRICT, frozen=True)
class Ranking:
    """Give 1 to the best and 0 to the worst, evenly spaced; equals get the mean of their places."""

    instruction: ClassVar[str] = (
        "Order all candidates from best to worst by their letters; the order in which they stand means nothing. End "
        "with one line of the form\nRanking: C > A = D > B\nwith = between candidates that are equally good."
    )

    def read_all(self, text: str, count: int) -> list[float]:
        said = final_line(text, "ranking").upper()
        places = [[letter.strip(MARKUP) for letter in part.split("=")] for part in said.split(">")]
        named = [letter for part in places for letter in part]
        if sorted(named) != list(string.ascii_uppercase[:count]):
            raise unreadable(text, f"each of the {count} candidates once")
        scores: dict[str, float] = {}
        ahead = 0
        for part in places:
            place = ahead + (len(part) - 1) / 2
            scores |= dict.fromkeys(part, 1 - place / (count - 1))
            ahead += len(part)
        return [scores[letter] for letter in string.ascii_uppercase[:count]]


def final_line(text: str, mark: str) -> str:
    """Return what the last line says after `mark:`, in lower case; all of the text may be one line without the mark."""
    # With something after it, or another such line before it, it may be quoted from what is judged.
    lines = [line.strip(MARKUP) for line in without_reasoning(text).splitlines()]
    lines = [line for line in lines if any(map(str.isalnum, line))]  # a closing fence says nothing
    said = [found for line in lines if (found := _after(mark, line)) is not None]
    if said and _after(mark, lines[-1]) == said[0] and len(set(said)) == 1:
        return said[0]
    if len(lines) == 1 and not said:
        return _plain(lines[0])
    raise without_line(text, mark)


def _after(mark: str, line: str) -> str | None:
    """Return what stands behind the mark, if the line begins with it."""
    if not line.lower().startswith(mark):
        return None
    rest = line[len(mark) :].lstrip(MARKUP)
    return _plain(rest[1:]) if rest[:1] in (":", "=") else None


def _plain(text: str) -> str:
    return " ".join(text.strip(MARKUP).rstrip(f"{MARKUP}.").lower().split())


def one_of(text: str, mark: str, values: Mapping[str, float]) -> float:
    value = values.get(final_line(text, mark))
    if value is None:
        raise without_line(text, mark)
    return value


def without_line(text: str, mark: str) -> JudgeFailure:
    return unreadable(text, f"one line `{mark.capitalize()}: ...` at its end")


def unreadable(text: str, wanted: str) -> JudgeFailure:
    shown = " ".join(text.split())[-80:]
    return JudgeFailure(f"the judge's answer is not {wanted}: ...{shown!r}", "unreadable")


def voted(vote: Vote, values: Sequence[float]) -> float:
    """Return one value for several samples. Majority: the most frequent one, or the mean of several such."""
    if vote == "mean":
        return mean(values)
    if vote == "median":
        return median(values)
    counts = Counter(values)
    most = max(counts.values())
    return mean(value for value, times in counts.items() if times == most)
