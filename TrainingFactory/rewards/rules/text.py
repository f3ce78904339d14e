"""Rules that compare the answer's text with the right one."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.options import STRICT
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.rules.answers import Extract
from TrainingFactory.rewards.rules.base import AnswerRule, ReferenceRule
from TrainingFactory.rewards.rules.wording import holds, normalised, squad_words
from TrainingFactory.types import Reward


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Exact(AnswerRule):
    """The same text, letter by letter; space around it aside."""

    rule: ClassVar[str] = "exact"
    whole_too: ClassVar[bool] = False
    extract: Extract = "whole"

    def score(self, answer: str, reference: Any) -> float:
        return float(answer.strip() == reference.strip())


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Normalised(AnswerRule):
    """The same text apart from letter case, spaces, quotes, emphasis and a full stop."""

    rule: ClassVar[str] = "normalised"

    def score(self, answer: str, reference: Any) -> float:
        return float(normalised(answer) == normalised(reference))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Contains(ReferenceRule):
    """The right answer occurs in the given one, as whole words. `every`: of several right ones all must."""

    rule: ClassVar[str] = "contains"
    whole_too: ClassVar[bool] = False
    every: bool = False

    def __call__(self, episode: Episode) -> Reward:
        right, answers = self.right_answers(episode), self.answers_of(episode)
        found = [any(holds(answer, one) for answer in answers) for one in right]
        return self.rewarded(all(found) if self.every else any(found))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ExactMatch(AnswerRule):
    """Exact match in the sense of SQuAD: letter case, punctuation and articles do not count."""

    rule: ClassVar[str] = "em"

    def score(self, answer: str, reference: Any) -> float:
        return float(squad_words(answer) == squad_words(reference))


@dataclass(config=STRICT, frozen=True, kw_only=True)
class F1(AnswerRule):
    """F1 in the sense of SQuAD: how far the words of the answer and of the right one are the same."""

    rule: ClassVar[str] = "f1"
    whole_too: ClassVar[bool] = False

    def score(self, answer: str, reference: Any) -> float:
        given, right = squad_words(answer), squad_words(reference)
        if given == right:
            return 1.0
        if " ".join(given) in _VERDICTS or " ".join(right) in _VERDICTS:
            return 0.0  # there is no half of a yes
        common = sum((Counter(given) & Counter(right)).values())
        return 2 * common / (len(given) + len(right))


_VERDICTS = ("yes", "no", "noanswer")
