"""Rules that compare an answer with the right one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from typing import Any, ClassVar

from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.checks import check_choice, check_flag, check_number
from TrainingFactory.rewards.rules.answers import normalised, references, squad_words
from TrainingFactory.rewards.rules.base import AnswerRule, paid
from TrainingFactory.rewards.rules.formulas import endless
from TrainingFactory.rewards.rules.notation import plain
from TrainingFactory.rewards.rules.numbers import (
    Number,
    is_number,
    last_number_text,
    only_number,
    same_number,
)
from TrainingFactory.types import Reward


@dataclass(frozen=True, kw_only=True)
class Exact(AnswerRule):
    """The same text, letter by letter; space around it aside."""

    rule: ClassVar[str] = "exact"
    whole_too: ClassVar[bool] = False
    extract: str = "whole"

    def score(self, answer: str, reference: Any) -> float:
        return float(answer.strip() == reference.strip())


@dataclass(frozen=True, kw_only=True)
class Normalised(AnswerRule):
    """The same text apart from letter case, spaces, quotes, emphasis and a full stop."""

    rule: ClassVar[str] = "normalised"

    def score(self, answer: str, reference: Any) -> float:
        return float(normalised(answer) == normalised(reference))


@dataclass(frozen=True, kw_only=True)
class Numeric(AnswerRule):
    """The same number. The answer must state exactly one; several are no answer.

    `tolerance` is absolute, `relative` a share of the right one; the larger counts. Without them whole numbers must
    be equal, others within 1e-6. `percent: strict` takes 50% as 0.5 only, not as 50. `units: false` ignores units.
    `decimal_comma` reads 1.234,5 and 3,14 as in most of Europe, also in right answers that are texts.
    """

    rule: ClassVar[str] = "numeric"
    reads_numbers: ClassVar[bool] = True
    tolerance: float | None = None
    relative: float | None = None
    percent: str = "auto"
    units: bool = True
    decimal_comma: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tolerance", "relative"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        check_choice("percent", self.percent, ("auto", "strict"))
        check_flag("units", self.units)
        check_flag("decimal_comma", self.decimal_comma)

    def last_number(self, text: str) -> str | None:
        return last_number_text(text, self.decimal_comma)

    def read_reference(self, reference: Any) -> Number:
        number = as_number(reference, self.decimal_comma)
        if number is None:
            raise ValueError(
                f"its answer {str(reference)[:60]!r} is not one number, so numeric cannot compare with it"
            )
        return number

    def score(self, answer: str, reference: Number) -> float:
        number = only_number(answer, self.decimal_comma)
        strict = self.percent == "strict"
        return float(
            number is not None
            and same_number(number, reference, self.tolerance, self.relative, strict, self.units)
        )


def as_number(reference: Any, decimal_comma: bool = False) -> Number | None:
    """A right answer as a number: a number, a text that states one, or a worked solution that ends in `#### 72`. With
    `decimal_comma` 1.234 is 1234, and 3.14, which cannot be read so, is what it is elsewhere."""
    if isinstance(reference, int | Fraction | Decimal | float) and not isinstance(reference, bool):
        if isinstance(reference, Decimal | float) and not math.isfinite(reference):
            raise ValueError(f"its answer is {reference}, which nothing can be compared with")
        return Number(Fraction(str(reference)))
    if not isinstance(reference, str):
        return None
    text = reference.rpartition("####")[2]
    return (only_number(text, True) if decimal_comma else None) or only_number(text)


@dataclass(frozen=True, kw_only=True)
class Auto(Numeric):
    """numeric where the right answer is a number, else normalised. A right answer with zeros in front (02139) is no
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


@dataclass(frozen=True, kw_only=True)
class Contains(AnswerRule):
    """The right answer occurs in the given one, as whole words. `every`: of several right ones all must."""

    rule: ClassVar[str] = "contains"
    whole_too: ClassVar[bool] = False
    every: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("every", self.every)

    def __call__(self, episode: Episode) -> Reward:
        if not self.every:
            return super().__call__(episode)
        right = references(episode.task, self.rule)
        text = self.text_of(episode.trajectory)
        answer = self.answer_in(text) if text is not None else None
        return paid(self.rule, min(self.score(answer, str(one)) for one in right) if answer else 0.0)

    def score(self, answer: str, reference: Any) -> float:
        return float(holds(answer, reference))


def holds(answer: str, reference: str) -> bool:
    """Whether the reference occurs in the answer as whole words, and a number as a whole number: there is no 72 in
    7.72, -72, 1/72, x^72 and 72,000. A dash between numbers (1939-1945) is no minus."""
    wanted = normalised(reference)
    before, after = r"(?<!\w)(?<!\d[.,])", r"(?!\w)(?![.,]\d)"
    if wanted[:1].isdigit():
        before += r"(?<![.,/^\\])(?<!\d')(?<![\s(\[=:$]-)(?<!\A-)"
    if wanted[-1:].isdigit():
        after += r"(?!'\d)(?! ?[/^] ?\w)"
        after += r"(?! \d{3}(?!\d))" if _SHORT.fullmatch(wanted) else ""
    return re.search(f"{before}{re.escape(wanted)}{after}", normalised(answer)) is not None


_SHORT = re.compile(r"\d{1,3}")


@dataclass(frozen=True, kw_only=True)
class ExactMatch(AnswerRule):
    """Exact match in the sense of SQuAD: letter case, punctuation and articles do not count."""

    rule: ClassVar[str] = "em"

    def score(self, answer: str, reference: Any) -> float:
        return float(squad_words(answer) == squad_words(reference))


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Choice(AnswerRule):
    """Multiple choice: the letter of the right choice, as `B`, `(B)`, `B. Paris` or `option B`. The right one is a
    letter, or a number that counts from 0. With the choices in the task's metadata (`choices`, a list) the text of
    the right one counts too."""

    rule: ClassVar[str] = "choice"
    whole_too: ClassVar[bool] = False
    letters: str = "ABCDEFGHIJ"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.letters, str) or not re.fullmatch(r"[A-Z]{2,26}", self.letters):
            raise ValueError(f"letters is {self.letters!r}; it must be capital letters such as ABCD")

    def __call__(self, episode: Episode) -> Reward:
        task = episode.task
        texts = task.metadata.get("choices") or []
        right = {self._letter(one, task.id) for one in references(task, self.rule)}
        text = self.text_of(episode.trajectory)
        chosen = (
            {self._chosen(answer, texts) for answer in self.answers_in(text)} if text is not None else set()
        )
        return paid(self.rule, float(bool(chosen & right)))

    def _letter(self, reference: Any, task: str) -> str:
        if (
            isinstance(reference, int)
            and not isinstance(reference, bool)
            and 0 <= reference < len(self.letters)
        ):
            return self.letters[reference]
        letter = str(reference).strip(" ().").upper()
        if len(letter) != 1 or letter not in self.letters:
            raise ValueError(f"task {task}: its answer {reference!r} is none of the letters {self.letters}")
        return letter

    def _chosen(self, answer: str, texts: list[Any]) -> str | None:
        answer = " ".join(plain(answer).split()).strip(" .")
        same = [
            letter
            for letter, text in zip(self.letters, texts, strict=False)
            if normalised(str(text)) == normalised(answer)
        ]
        if len(same) == 1:
            return same[0]
        match = _LETTER.fullmatch(answer)
        letter = match["letter"].upper() if match else ""
        if match is None or letter not in self.letters:
            return None
        rest = normalised(match["rest"]) if match["rest"] else ""
        known = [normalised(str(text)) for text in texts]
        if rest in known:  # the letter of one choice with the text of another is none
            place = self.letters.index(letter)
            return letter if place < len(known) and known[place] == rest else None
        others = self.letters.replace(letter, "")
        left = re.sub(_REFUSED.format(others), "", match["rest"])  # of: A (not B); A is right, B is wrong
        if _DENIED.match(left) or any(other in others for other in _letters_in(left)):
            return None
        return letter


def _letters_in(text: str) -> Iterator[str]:
    """The letters that stand for choices: alone after a mark or a word such as `or`, or before a mark. Not those
    of: a city, I think, Vitamin A."""
    for found in _LONE.finditer(text):
        before, after = text[max(0, found.start() - 10) : found.start()], text[found.end() : found.end() + 10]
        word = found.group() in "aAiI" and _WORD.match(after) and not _JOINED.match(after)
        if not word and (_MARK_BEFORE.search(before) or _MARK_AFTER.match(after)):
            yield found.group().upper()


_LONE = re.compile(r"(?<![\w'])[A-Za-z](?![\w'])(?! ?[=+*^<>]|\()")  # no letters of formulas
_WORD, _JOINED = re.compile(r" [a-z]{2}"), re.compile(r" (?:or|and|nor|is)\b")
_MARK_BEFORE = re.compile(
    r"(?:\A|[^\w\s'=+*^<>] ?|\b(?:or|and|nor|not|no|but|is|option|choice|answer|maybe|perhaps|than|either) )\Z",
    re.I,
)
_MARK_AFTER = re.compile(r"[)\]:/]|[.;] \S| (?:or|and|nor) ")
_LETTER = re.compile(
    r"(?:(?:the )?(?:correct )?(?:option|choice|answer) (?:is )?)?"
    r"[(\[]?(?P<letter>[A-Z])(?:[)\].:,;]+ ?| - | ?\(| (?=(?:is|because|since|as)\b)|$)(?P<rest>.*)",
    re.I,
)
_REFUSED = (
    r"\b(?:not|rather than|instead of) [(\[]?[{0}]\b[)\]]?(?! ?[/,] ?[A-Z]\b)"
    r"|(?<![\w'])[(\[]?[{0}][)\]]? (?:is|was) (?:wrong|incorrect|false|not)\b"
)
_DENIED = re.compile(
    r"(?:(?:is|was|can|seems|would be) )?(?:an? |the )?(?:(?:no|not|never|wrong|incorrect|false)\b(?!-)|isn't|can't)",
    re.I,
)


@dataclass(frozen=True, kw_only=True)
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
