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
from TrainingFactory.rewards.rules.json_answers import parse_strict_json, validate_schema
from TrainingFactory.tools.schema import make_validator

Vote = Literal["mean", "majority", "median"]
MAX_CANDIDATES = len(string.ascii_uppercase)
NUMBER_PATTERN = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|[+-]?nan|[+-]?inf(?:inity)?"
SCORE_PATTERN = re.compile(rf"({NUMBER_PATTERN})(?: ?/ ?(\d+(?:\.\d+)?))?")
MARKUP = " \t*_`"  # emphasis and code marks around a verdict
CODE_FENCE = "```"
MAX_FINITE = 1e300  # a larger integer may overflow a float


class Verdict(Protocol):
    """Answer format for one text; `parse` returns the verdict as a number from 0 (bad) to 1 (good)."""

    @property
    def instruction(self) -> str: ...
    def parse(self, reply: str) -> float: ...


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

    def parse(self, reply: str) -> float:
        match = SCORE_PATTERN.fullmatch(find_final_line(reply, "score"))
        if match is None:
            raise make_missing_line_error(reply, "score")
        score, max_score = match.groups()
        if max_score and float(max_score) != self.high:
            raise JudgeFailure(f"the judge's score is out of {max_score}, not {self.high:g}", "out_of_range")
        return self.rescale(float(score))

    def rescale(self, score: float) -> float:
        if not self.low <= score <= self.high:  # also rejects nan
            message = f"the judge's score is {score:g}; it must be from {self.low:g} to {self.high:g}"
            raise JudgeFailure(message, "out_of_range")
        return (score - self.low) / (self.high - self.low)


@dataclass(config=STRICT, frozen=True)
class YesNoVerdict:
    instruction: ClassVar[str] = "End with one line that is either\nVerdict: yes\nor\nVerdict: no"

    def parse(self, reply: str) -> float:
        return read_choice(reply, "verdict", {"yes": 1.0, "no": 0.0})


@dataclass(config=STRICT)
class JsonVerdict:
    """JSON object of `schema`, whose `key` holds the verdict: a boolean, a number from `low` to `high` (or in the
    schema's own range), or a string that `values` maps to such a number."""

    schema: Annotated[dict[str, Any], AfterValidator(validate_schema)]
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

    def parse(self, reply: str) -> float:
        answer = parse_strict_json(self._find_verdict(without_reasoning(reply).strip()))
        if not isinstance(answer, dict):
            raise make_unreadable_error(reply, "one JSON object")
        try:
            is_valid = make_validator(self.schema).is_valid(answer)
        except (OverflowError, RecursionError):  # too large or too deep to validate
            is_valid = False
        if not is_valid or self.key not in answer:
            raise make_unreadable_error(reply, f"an object of the schema with the key {self.key}")
        verdict = answer[self.key]
        if isinstance(verdict, bool):
            return float(verdict)
        if isinstance(verdict, str) and verdict in self.values:
            verdict = self.values[verdict]
        if not isinstance(verdict, int | float):
            raise make_unreadable_error(reply, f"a number under {self.key}")
        return self.scale.rescale(verdict if abs(verdict) < MAX_FINITE else math.inf)

    def _find_verdict(self, reply: str) -> str:
        """Return the fenced block at the end of the text, or the whole text if there is none. Return "" if the key also
        occurs before the block, because that may be another verdict."""
        text_before, fence, block = reply.removesuffix(CODE_FENCE).rpartition(CODE_FENCE)
        if not fence or not reply.endswith(CODE_FENCE):
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

    def parse(self, reply: str) -> float:
        return read_choice(reply, "winner", {"a": 1.0, "b": 0.0, "tie": 0.5})


@dataclass(config=STRICT, frozen=True)
class RankingVerdict:
    """Ranking of a group: from 1 for the best to 0 for the worst, evenly spaced; ties share their mean rank."""

    instruction: ClassVar[str] = (
        "Order all candidates from best to worst by their letters; the order in which they stand means nothing. End "
        "with one line of the form\nRanking: C > A = D > B\nwith = between candidates that are equally good."
    )

    def parse_all(self, reply: str, num_candidates: int) -> list[float]:
        ranking = find_final_line(reply, "ranking").upper()
        tied_groups = [[letter.strip(MARKUP) for letter in group.split("=")] for group in ranking.split(">")]
        letters = [letter for group in tied_groups for letter in group]
        if sorted(letters) != list(string.ascii_uppercase[:num_candidates]):
            raise make_unreadable_error(reply, f"each of the {num_candidates} candidates once")
        scores: dict[str, float] = {}
        num_better = 0
        for group in tied_groups:
            rank = num_better + (len(group) - 1) / 2
            scores |= dict.fromkeys(group, 1 - rank / (num_candidates - 1))
            num_better += len(group)
        return [scores[letter] for letter in string.ascii_uppercase[:num_candidates]]


def find_final_line(reply: str, prefix: str) -> str:
    """Return the text after `prefix:` in the last line, in lower case. A text of one line needs no prefix."""
    # A marked line with text after it, or two that differ, may be quoted from the judged material: rejected.
    lines = [line.strip(MARKUP) for line in without_reasoning(reply).splitlines()]
    lines = [line for line in lines if any(map(str.isalnum, line))]  # drops closing fences
    verdicts = [verdict for line in lines if (verdict := _strip_prefix(prefix, line)) is not None]
    if verdicts and _strip_prefix(prefix, lines[-1]) == verdicts[0] and len(set(verdicts)) == 1:
        return verdicts[0]
    if len(lines) == 1 and not verdicts:
        return _normalise_line(lines[0])
    raise make_missing_line_error(reply, prefix)


def _strip_prefix(prefix: str, line: str) -> str | None:
    """Return the text after `prefix:` or `prefix=`; None if the line does not start with it."""
    if not line.lower().startswith(prefix):
        return None
    remainder = line[len(prefix) :].lstrip(MARKUP)
    return _normalise_line(remainder[1:]) if remainder[:1] in (":", "=") else None


def _normalise_line(text: str) -> str:
    return " ".join(text.strip(MARKUP).rstrip(f"{MARKUP}.").lower().split())


def read_choice(reply: str, prefix: str, scores: Mapping[str, float]) -> float:
    score = scores.get(find_final_line(reply, prefix))
    if score is None:
        raise make_missing_line_error(reply, prefix)
    return score


def make_missing_line_error(reply: str, prefix: str) -> JudgeFailure:
    return make_unreadable_error(reply, f"one line `{prefix.capitalize()}: ...` at its end")


def make_unreadable_error(reply: str, expected_text: str) -> JudgeFailure:
    ending = " ".join(reply.split())[-80:]
    return JudgeFailure(f"the judge's answer is not {expected_text}; it ends with {ending!r}", "unreadable")


def aggregate_scores(vote: Vote, scores: Sequence[float]) -> float:
    """Aggregate the values of several samples. With `majority`, return the most frequent value, or the mean if several
    values are equally frequent."""
    if vote == "mean":
        return mean(scores)
    if vote == "median":
        return median(scores)
    counts = Counter(scores)
    top_count = max(counts.values())
    return mean(score for score, count in counts.items() if count == top_count)
