"""What a judge has to write, and how it is read. What cannot be read for certain raises JudgeFailure."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any, ClassVar, Protocol

from jsonschema.exceptions import SchemaError

from TrainingFactory.rewards.answers import without_reasoning
from TrainingFactory.rewards.checks import check_choice, check_number
from TrainingFactory.rewards.judge_endpoints import JudgeFailure
from TrainingFactory.rewards.rules_form import read_json
from TrainingFactory.tools.schema import unknown_reference, validator_of

VOTES = ("mean", "majority", "median")
MAX_CANDIDATES = len(string.ascii_uppercase)
NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[+-]?nan|[+-]?inf(?:inity)?"


class Verdict(Protocol):
    """The verdict on one text, as a number from 0 (bad) to 1 (good)."""

    @property
    def instruction(self) -> str: ...
    def read(self, text: str) -> float: ...


@dataclass(slots=True, frozen=True)
class Score:
    """A number from `low` to `high`, mapped to 0 to 1."""

    low: float = 0.0
    high: float = 10.0

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            check_number(name, getattr(self, name), low=-math.inf)
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}; low must be below high")

    @property
    def instruction(self) -> str:
        return (
            f"Give a score from {self.low:g} (worst) to {self.high:g} (best). End with one line of the form\n"
            "Score: NUMBER"
        )

    def read(self, text: str) -> float:
        said = marked_line(text, "score", rf"(?:{NUMBER})(?:\s*/\s*\d+(?:\.\d+)?)?")
        value, _, out_of = said.partition("/")
        if out_of and float(out_of) != self.high:
            raise JudgeFailure(
                f"the judge's score is out of {out_of.strip()}, not {self.high:g}", "out_of_range"
            )
        return self.scaled(float(value))

    def scaled(self, value: float) -> float:
        if not self.low <= value <= self.high:  # nor for nan
            raise JudgeFailure(
                f"the judge's score is {value:g}; it must be from {self.low:g} to {self.high:g}",
                "out_of_range",
            )
        return (value - self.low) / (self.high - self.low)


@dataclass(slots=True, frozen=True)
class YesNo:
    instruction: ClassVar[str] = "End with one line that is either\nVerdict: yes\nor\nVerdict: no"

    def read(self, text: str) -> float:
        return float(marked_line(text, "verdict", "yes|no") == "yes")


@dataclass(slots=True, frozen=True)
class JsonVerdict:
    """A JSON object of `schema`, whose `key` is a truth value, a number from `low` to `high`, or one of `values`, a
    mapping from texts to numbers in that range."""

    schema: dict[str, Any]
    key: str = "score"
    low: float = 0.0
    high: float = 1.0
    values: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        Score(self.low, self.high)
        try:
            checker = validator_of(self.schema)
            checker.check_schema(self.schema)
        except (SchemaError, TypeError, AttributeError) as error:
            raise ValueError(
                f"schema is no JSON schema ({getattr(error, 'message', error)!s:.120})"
            ) from error
        if unknown := unknown_reference(self.schema):
            raise ValueError(f"schema refers to {unknown}, which is not in it")
        if self.key not in self.schema.get("properties", {}):
            raise ValueError(f"key is {self.key!r}, which is not among the properties of schema")
        for name, value in self.values.items():
            check_number(f"values.{name}", value, self.low, self.high)

    @property
    def instruction(self) -> str:
        return f"Answer with one JSON object of this schema and nothing else:\n{json.dumps(self.schema)}"

    def read(self, text: str) -> float:
        value = read_json(without_reasoning(text).strip())
        if not isinstance(value, dict):
            raise unreadable(text, "one JSON object")
        problem = next(iter(validator_of(self.schema).iter_errors(value)), None)
        if problem is not None or self.key not in value:
            raise unreadable(text, f"an object of the schema with the key {self.key}")
        found = value[self.key]
        if isinstance(found, bool):
            return float(found)
        if isinstance(found, str) and found in self.values:
            found = self.values[found]
        if not isinstance(found, int | float):
            raise unreadable(text, f"a number under {self.key}")
        return Score(self.low, self.high).scaled(found)


@dataclass(slots=True, frozen=True)
class Pairwise:
    """Which of two is better: 1 if A is, 0 if B is, 0.5 for a tie."""

    instruction: ClassVar[str] = (
        "Say which of the two is better, A or B; the order in which they stand means nothing. End with one line that "
        "is one of\nWinner: A\nWinner: B\nWinner: tie"
    )

    def read(self, text: str) -> float:
        return {"a": 1.0, "b": 0.0, "tie": 0.5}[marked_line(text, "winner", "a|b|tie")]


@dataclass(slots=True, frozen=True)
class Ranking:
    """All candidates from best to worst, `=` between equals. `read_all` gives 1 to the best and 0 to the worst,
    evenly spaced; equals get the mean of their places."""

    instruction: ClassVar[str] = (
        "Order all candidates from best to worst by their letters; the order in which they stand means nothing. End "
        "with one line of the form\nRanking: C > A = D > B\nwith = between candidates that are equally good."
    )

    def read_all(self, text: str, count: int) -> list[float]:
        said = marked_line(text, "ranking", r"[a-z](?:\s*[>=]\s*[a-z])*").replace(" ", "").upper()
        places = [part.split("=") for part in said.split(">")]
        named = [letter for part in places for letter in part]
        if sorted(named) != list(string.ascii_uppercase[:count]):
            raise unreadable(text, f"each of the {count} candidates once")
        scores: dict[str, float] = {}
        ahead = 0
        for part in places:
            place = ahead + (len(part) - 1) / 2
            scores |= dict.fromkeys(part, 1 - place / (count - 1) if count > 1 else 1.0)
            ahead += len(part)
        return [scores[letter] for letter in string.ascii_uppercase[:count]]


def marked_line(text: str, mark: str, pattern: str) -> str:
    """What a line of the form `mark: ...` says, in lower case; all of the text may be that too, without the mark. Two
    lines that say different things are no verdict: one of them may be quoted from what is judged."""
    text = re.sub(r"[*_`]", "", without_reasoning(text)).strip()
    lines = re.findall(rf"^[ \t]*{mark}[ \t]*[:=][ \t]*(.*?)[ \t]*\.?[ \t]*$", text, re.I | re.M)
    said = {" ".join(line.lower().split()) for line in lines or [text.removesuffix(".")]}
    if len(said) == 1 and re.fullmatch(pattern, found := said.pop(), re.I):
        return found
    raise unreadable(text, f"one line `{mark.capitalize()}: ...`")


def unreadable(text: str, wanted: str) -> JudgeFailure:
    shown = " ".join(text.split())[-80:]
    return JudgeFailure(f"the judge's answer is not {wanted}: ...{shown!r}", "unreadable")


def check_vote(vote: str, samples: int) -> None:
    check_choice("vote", vote, VOTES)
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples is {samples!r}; it must be a whole number, 1 or more")


def voted(vote: str, values: Sequence[float]) -> float:
    """One value for several samples. Majority: the most frequent; the mean of those that are equally frequent."""
    if vote == "mean":
        return mean(values)
    if vote == "median":
        return median(values)
    counts = Counter(values)
    most = max(counts.values())
    return mean(value for value, times in counts.items() if times == most)
