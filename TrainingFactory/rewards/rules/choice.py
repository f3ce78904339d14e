"""The rule of multiple choice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.rules.answers import ReferenceRule
from TrainingFactory.rewards.rules.numbers import plain
from TrainingFactory.rewards.rules.text import normalised
from TrainingFactory.types import Reward


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Choice(ReferenceRule):
    """Reward the letter of the right choice, or its text where the task's metadata has the `choices`. The right one is
    a letter, or a number that counts from 0."""

    rule: ClassVar[str] = "choice"
    whole_too: ClassVar[bool] = False
    letters: Annotated[str, Field(pattern=r"^[A-Z]{2,26}$")] = "ABCDEFGHIJ"

    def __call__(self, episode: Episode) -> Reward:
        right, texts = self.right_answers(episode), episode.task.metadata.get("choices") or []
        chosen = (self._chosen(answer, texts) for answer in self.answers_of(episode))
        return self.rewarded(any(letter in right for letter in chosen))

    def read_reference(self, reference: Any) -> str:
        letter = str(reference).strip(" ().").upper()
        if type(reference) is int and 0 <= reference < len(self.letters):
            letter = self.letters[reference]
        if len(letter) != 1 or letter not in self.letters:
            raise ValueError(f"its answer {reference!r} is none of the letters {self.letters}")
        return letter

    def _chosen(self, answer: str, texts: list[Any]) -> str | None:
        answer = " ".join(plain(answer).split()).strip(" .")
        known = [normalised(str(text)) for text in texts]
        if known.count(normalised(answer)) == 1 and known.index(normalised(answer)) < len(self.letters):
            return self.letters[known.index(normalised(answer))]
        match = _LETTER.fullmatch(answer)
        letter = match["letter"].upper() if match else ""
        if match is None or letter not in self.letters:
            return None
        rest = normalised(match["rest"]) if match["rest"] else ""
        if rest in known:  # the letter of one choice with the text of another is none
            return letter if rest in known[self.letters.index(letter) :][:1] else None
        others = self.letters.replace(letter, "")
        left = re.sub(_REFUSED.format(others), "", match["rest"])  # of: A (not B); A is right, B is wrong
        if _DENIED.match(left) or any(other in others for other in _letters_in(left)):
            return None
        return letter


def _letters_in(text: str) -> Iterator[str]:
    """Yield the letters that stand for choices. Not those of: a city, I think, Vitamin A."""
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
