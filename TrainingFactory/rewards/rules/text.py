"""Rules that compare the text of the answer with the reference: exact, normalised, contained, or SQuAD's EM and F1."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT
from TrainingFactory.rewards.rules.answers import AnswerRule, ExtractMode
from TrainingFactory.rewards.rules.numbers import convert_superscripts


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ExactRule(AnswerRule):
    """Reward an identical text, apart from surrounding whitespace."""

    rule: ClassVar[str] = "exact"
    tries_whole_text: ClassVar[bool] = False
    extract: ExtractMode = "whole"

    def score(self, answer: str, reference: Any) -> float:
        return float(answer.strip() == reference.strip())


class NormalisedRule(AnswerRule):
    """Reward an equal text, ignoring case, whitespace, quotes, emphasis and surrounding punctuation."""

    rule: ClassVar[str] = "normalised"

    def score(self, answer: str, reference: Any) -> float:
        return float(normalise_text(answer) == normalise_text(reference))


class ContainsRule(AnswerRule):
    """Reward an answer that contains the reference as whole words."""

    rule: ClassVar[str] = "contains"
    tries_whole_text: ClassVar[bool] = False

    def score(self, answer: str, reference: Any) -> float:
        return float(contains_words(answer, reference))


class SquadExactMatchRule(AnswerRule):
    """Reward SQuAD's exact match, which ignores case, punctuation and articles."""

    rule: ClassVar[str] = "em"

    def score(self, answer: str, reference: Any) -> float:
        return float(split_squad_words(answer) == split_squad_words(reference))


class SquadF1Rule(AnswerRule):
    """Reward SQuAD's F1, the word overlap of the answer and the reference."""

    rule: ClassVar[str] = "f1"
    tries_whole_text: ClassVar[bool] = False

    def score(self, answer: str, reference: Any) -> float:
        words, expected_words = split_squad_words(answer), split_squad_words(reference)
        if words == expected_words:
            return 1.0
        if " ".join(words) in _YES_NO_ANSWERS or " ".join(expected_words) in _YES_NO_ANSWERS:
            return 0.0  # yes and no have no partial score
        num_common = sum((Counter(words) & Counter(expected_words)).values())
        return 2 * num_common / (len(words) + len(expected_words))


_YES_NO_ANSWERS = ("yes", "no", "noanswer")


def normalise_text(text: str) -> str:
    """Return the text with case, Unicode forms, whitespace, emphasis and surrounding punctuation normalised."""
    text = unicodedata.normalize("NFKC", convert_superscripts(text)).casefold().translate(_QUOTE_TABLE)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]{0,200})\}", r"\1", text)
    text = " ".join(text.replace("**", "").split())
    stripped_text = text.lstrip(_SURROUNDING_CHARS)
    if stripped_text[:1].isdigit() and _DECIMAL_POINT.search(text[: len(text) - len(stripped_text)]):
        stripped_text = text[len(text) - len(stripped_text) - 1 :]  # .5 is not 5
    return stripped_text.rstrip(_SURROUNDING_CHARS) or text


_QUOTE_TABLE = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u2212", "''\"\"---")
_SURROUNDING_CHARS = " \"'`*_.,;:!?()[]$"
_DECIMAL_POINT = re.compile(r"(?<![.,])[.,]\Z")


def contains_words(answer: str, reference: str) -> bool:
    """Return whether the answer contains the reference as whole words, and a number only as a whole number: 7.72, -72,
    1/72, x^72 and 72,000 do not contain 72. A dash between numbers (1939-1945) is not a minus."""
    phrase = normalise_text(reference)
    start_boundary, end_boundary = r"(?<!\w)(?<!\d[.,])", r"(?!\w)(?![.,]\d)"
    if phrase[:1].isdigit():
        start_boundary += r"(?<![.,/^\\])(?<!\d')(?<![\s(\[=:$]-)(?<!\A-)"
    if phrase[-1:].isdigit():
        end_boundary += r"(?!'\d)(?! ?[/^] ?\w)"
        end_boundary += r"(?! \d{3}(?!\d))" if re.fullmatch(r"\d{1,3}", phrase) else ""
    return re.search(f"{start_boundary}{re.escape(phrase)}{end_boundary}", normalise_text(answer)) is not None


def split_squad_words(text: str) -> list[str]:
    """Return the words as SQuAD compares them: in lower case, without punctuation and articles. Unlike SQuAD, keep the
    articles of a text that has no other words (`The` and `A` differ) and the marks in numbers (1.5 and 15 differ)."""
    lower_text = unicodedata.normalize("NFKC", convert_superscripts(text)).lower()
    words_text = _NUMBER_MARK.sub(_protect_number_mark, lower_text).translate(_PUNCTUATION_TABLE)
    return _ARTICLE_WORD.sub(" ", words_text).split() or words_text.split() or lower_text.split()


def _protect_number_mark(match: re.Match[str]) -> str:
    """Return the mark as private-use characters, which are not punctuation; "" for a thousands separator."""
    return "" if match["thousands"] is not None else match.group().translate(_PROTECTED_MARKS)


_ARTICLE_WORD = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION_TABLE = str.maketrans("", "", string.punctuation + "\u2018\u2019\u201c\u201d")
# Marks that belong to a number: without them 1.5 would be 15, 3-4 would be 34, 5e-3 would be 5e3, and -7 would be 7.
# Thousands separators are optional, so they are dropped.
_DASH_CHARS = "\u2212\u2013"
_NUMBER_MARK = re.compile(
    r"(?<=\d)(?:(?<!\d{4})(?<!(?<!\d)0)[,'_](?=\d{3}(?!\d))(?P<thousands>)"
    rf"|[{re.escape(string.punctuation)}{_DASH_CHARS}]+(?=\d))"
    r"|(?<=\de)[-\u2212](?=\d)|(?<![\w)])[-\u2212](?=\.?\d)|(?<!\w)\.(?=\d)"
)
_PROTECTED_MARKS = {ord(character): 0xE000 + ord(character) for character in string.punctuation}
_PROTECTED_MARKS |= {ord(dash): _PROTECTED_MARKS[ord("-")] for dash in _DASH_CHARS}
