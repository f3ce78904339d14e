"""Answer formats of judges, with their parsers. A parser raises JudgeFailure for an ambiguous answer."""

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
from TrainingFactory.rewards.rules.json_answers import strict_json, validated_schema
from TrainingFactory.tools.schema import make_validator

Vote = Literal["mean", "majority", "median"]
MAX_CANDIDATES = len(string.ascii_uppercase)
NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|[+-]?nan|[+-]?inf(?:inity)?"
SCORE = re.compile(rf"({NUMBER})(?: ?/ ?(\d+(?:\.\d+)?))?")
MARKUP = " \t*_`"  # emphasis and code marks around a verdict
FENCE = "```"
MAX_FINITE = 1e300  # a larger integer may overflow a float


class Verdict(Protocol):
    """Answer format for one text; `read` parses the verdict as a number from 0 (bad) to 1 (good)."""

    @property
    def instruction(self) -> str: ...
    def read(self, reply: str) -> float: ...


@dataclass(config=STRICT, frozen=True)
class ScoreVerdict:
    """Score from `low` to `high`, scaled to 0 to 1."""

    low: float = 0.0
    high: float = 10.0

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}; low must be below high")

    @property
    def instruction(self) -> str:
        return (
            f"Give a score from {self.low:g} (worst) to {self.high:g} (best). End with one line of the form\n"
            "Score: NUMBER"
        )

    def read(self, reply: str) -> float:
        match = SCORE.fullmatch(final_line(reply, "score"))
        if match is None:
            raise missing_line_error(reply, "score")
        value, maximum = match.groups()
        if maximum and float(maximum) != self.high:
            raise JudgeFailure(f"the judge's score is out of {maximum}, not {self.high:g}", "out_of_range")
        return self.rescale(float(value))

    def rescale(self, value: float) -> float:
        if not self.low <= value <= self.high:  # also rejects nan
            message = f"the judge's score is {value:g}; it must be from {self.low:g} to {self.high:g}"
            raise JudgeFailure(message, "out_of_range")
        return (value - self.low) / (self.high - self.low)


@dataclass(config=STRICT, frozen=True)
class YesNoVerdict:
    instruction: ClassVar[str] = "End with one line that is either\nVerdict: yes\nor\nVerdict: no"

    def read(self, reply: str) -> float:
        return read_choice(reply, "verdict", {"yes": 1.0, "no": 0.0})


@dataclass(config=STRICT)
class JsonVerdict:
    """JSON object of `schema`, whose `key` holds the verdict: a boolean, a number from `low` to `high` (or in the
    schema's own range), or a string that `values` maps to such a number."""

    schema: Annotated[dict[str, Any], AfterValidator(validated_schema)]
    key: Text = "score"
    low: float = 0.0
    high: float = 1.0
    values: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.key not in self.schema.get("properties", {}):
            raise ValueError(f"key is {self.key!r}; it must be one of the properties of schema")
        low, high = self.scale.low, self.scale.high
        for name, value in self.values.items():
            if not low <= value <= high:
                raise ValueError(f"values.{name} is {value:g}; it must be between {low:g} and {high:g}")

    @cached_property
    def scale(self) -> ScoreVerdict:
        """Return the range from worst to best: the schema's minimum and maximum, else `low` and `high`."""
        low = self._key_schema.get("minimum", self.low)
        high = self._key_schema.get("maximum", self.high)
        return make_from(ScoreVerdict, {"low": low, "high": high}, "the range")

    @property
    def _key_schema(self) -> dict[str, Any]:
        schema = self.schema["properties"][self.key]
        return schema if isinstance(schema, dict) else {}  # a schema may be `true`

    @property
    def instruction(self) -> str:
        is_numeric = self._key_schema.get("type") in ("number", "integer")
        low, high = self.scale.low, self.scale.high
        hint = f" {self.key} is from {low:g} (worst) to {high:g} (best)." if is_numeric else ""
        schema = json.dumps(self.schema)
        return f"Answer with one JSON object of this schema and nothing else.{hint}\n{schema}"

    def read(self, reply: str) -> float:
        value = strict_json(self._find_verdict(without_reasoning(reply).strip()))
        if not isinstance(value, dict):
            raise unreadable_error(reply, "one JSON object")
        try:
            is_valid = make_validator(self.schema).is_valid(value)
        except (OverflowError, RecursionError):  # too large or too deep to validate
            is_valid = False
        if not is_valid or self.key not in value:
            raise unreadable_error(reply, f"an object of the schema with the key {self.key}")
        verdict = value[self.key]
        if isinstance(verdict, bool):
            return float(verdict)
        if isinstance(verdict, str) and verdict in self.values:
            verdict = self.values[verdict]
        if not isinstance(verdict, int | float):
            raise unreadable_error(reply, f"a number under {self.key}")
        return self.scale.rescale(verdict if abs(verdict) < MAX_FINITE else math.inf)

    def _find_verdict(self, reply: str) -> str:
        """Return the fenced block at the end of the text, or the whole text if there is none. Return "" if the key also
        occurs before the block, because that may be another verdict."""
        text_before, fence, block = reply.removesuffix(FENCE).rpartition(FENCE)
        if not fence or not reply.endswith(FENCE):
            return reply
        if json.dumps(self.key) in text_before:
            return ""
        language, _, content = block.partition("\n")
        return content if language.strip().isalnum() else block


@dataclass(config=STRICT, frozen=True)
class PairwiseVerdict:
    """Comparison of two texts: 1 if A is better, 0 if B is, 0.5 for a tie."""

    instruction: ClassVar[str] = (
        "Say which of the two is better, A or B; the order in which they stand means nothing. End with one line that "
        "is one of\nWinner: A\nWinner: B\nWinner: tie"
    )

    def read(self, reply: str) -> float:
        return read_choice(reply, "winner", {"a": 1.0, "b": 0.0, "tie": 0.5})


@dataclass(config=STRICT, frozen=True)
class RankingVerdict:
    """Ranking of a group: from 1 for the best to 0 for the worst, evenly spaced; ties share their mean rank."""

    instruction: ClassVar[str] = (
        "Order all candidates from best to worst by their letters; the order in which they stand means nothing. End "
        "with one line of the form\nRanking: C > A = D > B\nwith = between candidates that are equally good."
    )

    def read_all(self, reply: str, count: int) -> list[float]:
        ranking = final_line(reply, "ranking").upper()
        tied_groups = [[letter.strip(MARKUP) for letter in group.split("=")] for group in ranking.split(">")]
        letters = [letter for group in tied_groups for letter in group]
        if sorted(letters) != list(string.ascii_uppercase[:count]):
            raise unreadable_error(reply, f"each of the {count} candidates once")
        scores: dict[str, float] = {}
        num_better = 0
        for group in tied_groups:
            rank = num_better + (len(group) - 1) / 2
            scores |= dict.fromkeys(group, 1 - rank / (count - 1))
            num_better += len(group)
        return [scores[letter] for letter in string.ascii_uppercase[:count]]


def final_line(reply: str, prefix: str) -> str:
    """Return the text after `prefix:` in the last line, in lower case. A text of one line needs no prefix."""
    # A marked line with text after it, or two that differ, may be quoted from the judged material: rejected.
    lines = [line.strip(MARKUP) for line in without_reasoning(reply).splitlines()]
    lines = [line for line in lines if any(map(str.isalnum, line))]  # drops closing fences
    verdicts = [verdict for line in lines if (verdict := _text_after(prefix, line)) is not None]
    if verdicts and _text_after(prefix, lines[-1]) == verdicts[0] and len(set(verdicts)) == 1:
        return verdicts[0]
    if len(lines) == 1 and not verdicts:
        return _normalise(lines[0])
    raise missing_line_error(reply, prefix)


def _text_after(prefix: str, line: str) -> str | None:
    """Return the text after `prefix:` or `prefix=`; None if the line does not start with it."""
    if not line.lower().startswith(prefix):
        return None
    remainder = line[len(prefix) :].lstrip(MARKUP)
    return _normalise(remainder[1:]) if remainder[:1] in (":", "=") else None


def _normalise(text: str) -> str:
    return " ".join(text.strip(MARKUP).rstrip(f"{MARKUP}.").lower().split())


def read_choice(reply: str, prefix: str, values: Mapping[str, float]) -> float:
    value = values.get(final_line(reply, prefix))
    if value is None:
        raise missing_line_error(reply, prefix)
    return value


def missing_line_error(reply: str, prefix: str) -> JudgeFailure:
    return unreadable_error(reply, f"one line `{prefix.capitalize()}: ...` at its end")


def unreadable_error(reply: str, expected: str) -> JudgeFailure:
    tail = " ".join(reply.split())[-80:]
    return JudgeFailure(f"the judge's answer is not {expected}; it ends with {tail!r}", "unreadable")


def aggregate(vote: Vote, values: Sequence[float]) -> float:
    """Aggregate the values of several samples. With `majority`, return the most frequent value, or the mean if several
    values are equally frequent."""
    if vote == "mean":
        return mean(values)
    if vote == "median":
        return median(values)
    counts = Counter(values)
    top_count = max(counts.values())
    return mean(value for value, count in counts.items() if count == top_count)
