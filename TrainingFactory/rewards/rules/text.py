"""Rules that compare the answer's text with the right one: normalised, by SQuAD's words, or as part of a longer one."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT
from TrainingFactory.rewards.rules.answers import AnswerRule, Extract
from TrainingFactory.rewards.rules.numbers import lowered


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Exact(AnswerRule):
    """Reward the same text, letter by letter; space around it aside."""

    rule: ClassVar[str] = "exact"
    whole_too: ClassVar[bool] = False
    extract: Extract = "whole"

    def score(self, answer: str, reference: Any) -> float:
        return float(answer.strip() == reference.strip())


class Normalised(AnswerRule):
    """Reward the same text apart from letter case, spaces, quotes, emphasis and a full stop."""

    rule: ClassVar[str] = "normalised"

    def score(self, answer: str, reference: Any) -> float:
        return float(normalised(answer) == normalised(reference))


class Contains(AnswerRule):
    """Reward a right answer that occurs in the given one, as whole words."""

    rule: ClassVar[str] = "contains"
    whole_too: ClassVar[bool] = False

    def score(self, answer: str, reference: Any) -> float:
        return float(holds(answer, reference))


class ExactMatch(AnswerRule):
    """Reward an exact match in the sense of SQuAD: letter case, punctuation and articles do not count."""

    rule: ClassVar[str] = "em"

    def score(self, answer: str, reference: Any) -> float:
        return float(squad_words(answer) == squad_words(reference))


class F1(AnswerRule):
    """Give the F1 of SQuAD: how far the words of the answer and of the right one are the same."""

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


def normalised(text: str) -> str:
    """Return the text without what does not matter: case, Unicode forms, spaces, emphasis, quotes around it."""
    text = unicodedata.normalize("NFKC", lowered(text)).casefold().translate(_QUOTES)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]{0,200})\}", r"\1", text)
    text = " ".join(text.replace("**", "").split())
    inside = text.lstrip(_AROUND)
    if inside[:1].isdigit() and _POINT.search(text[: len(text) - len(inside)]):
        inside = text[len(text) - len(inside) - 1 :]  # .5 is not 5
    return inside.rstrip(_AROUND) or text


_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u2212", "''\"\"---")
_AROUND = " \"'`*_.,;:!?()[]$"
_POINT = re.compile(r"(?<![.,])[.,]\Z")


def holds(answer: str, reference: str) -> bool:
    """Return true if the reference occurs in the answer as whole words, and a number as a whole number: there is no 72
    in 7.72, -72, 1/72, x^72 and 72,000. A dash between numbers (1939-1945) is no minus."""
    wanted = normalised(reference)
    before, after = r"(?<!\w)(?<!\d[.,])", r"(?!\w)(?![.,]\d)"
    if wanted[:1].isdigit():
        before += r"(?<![.,/^\\])(?<!\d')(?<![\s(\[=:$]-)(?<!\A-)"
    if wanted[-1:].isdigit():
        after += r"(?!'\d)(?! ?[/^] ?\w)"
        after += r"(?! \d{3}(?!\d))" if re.fullmatch(r"\d{1,3}", wanted) else ""
    return re.search(f"{before}{re.escape(wanted)}{after}", normalised(answer)) is not None


def squad_words(text: str) -> list[str]:
    """Return the words as SQuAD compares them: lower case, without punctuation and articles. A text of nothing else
    keeps them: `The` and `A` are different answers. So does a number: 1.5 and 15 are too."""
    small = unicodedata.normalize("NFKC", lowered(text)).lower()
    bare = _IN_NUMBER.sub(_kept, small).translate(_PUNCTUATION)
    return _ARTICLES.sub(" ", bare).split() or bare.split() or small.split()


def _kept(mark: re.Match[str]) -> str:
    return "" if mark["thousands"] is not None else mark.group().translate(_KEPT)


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation + "\u2018\u2019\u201c\u201d")
# Without these marks 1.5 would be 15, 3-4 would be 34, 5e-3 would be 5e3, and -7 would be 7. They are put where no
# punctuation is; only thousands are written with and without theirs.
_DASHES = "\u2212\u2013"
_IN_NUMBER = re.compile(
    r"(?<=\d)(?:(?<!\d{4})(?<!(?<!\d)0)[,'_](?=\d{3}(?!\d))(?P<thousands>)"
    rf"|[{re.escape(string.punctuation)}{_DASHES}]+(?=\d))"
    r"|(?<=\de)[-\u2212](?=\d)|(?<![\w)])[-\u2212](?=\.?\d)|(?<!\w)\.(?=\d)"
)
_KEPT = {ord(mark): 0xE000 + ord(mark) for mark in string.punctuation}
_KEPT |= {ord(dash): _KEPT[ord("-")] for dash in _DASHES}
