"""Rule for multiple-choice answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.rules.answers import ReferenceRule
from TrainingFactory.rewards.rules.numbers import normalise_symbols
from TrainingFactory.rewards.rules.text import normalise_text
from TrainingFactory.types import Reward


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ChoiceRule(ReferenceRule):
    """Reward the letter of the correct choice, or its text if the task's metadata has `choices`. The reference is a
    letter, or an index that counts from 0."""

    rule: ClassVar[str] = "choice"
    tries_whole_text: ClassVar[bool] = False
    letters: Annotated[str, Field(pattern=r"^[A-Z]{2,26}$")] = "ABCDEFGHIJ"

    def __call__(self, episode: Episode) -> Reward:
        correct_letters = self.parse_references(episode)
        choice_texts = episode.task.metadata.get("choices") or []
        letters = (self._parse_choice(answer, choice_texts) for answer in self.extract_candidates(episode))
        return self.make_reward(any(letter in correct_letters for letter in letters))

    def parse_reference(self, reference: Any) -> str:
        letter = str(reference).strip(" ().").upper()
        if type(reference) is int and 0 <= reference < len(self.letters):
            letter = self.letters[reference]
        if len(letter) != 1 or letter not in self.letters:
            raise ValueError(f"its answer {reference!r} is not one of the letters {self.letters}")
        return letter

    def _parse_choice(self, answer: str, choice_texts: list[Any]) -> str | None:
        """Return the letter that the answer chooses; None if it chooses none, several, or denies its choice."""
        answer = " ".join(normalise_symbols(answer).split()).strip(" .")
        choices = [normalise_text(str(text)) for text in choice_texts]
        if choices.count(normalise_text(answer)) == 1 and choices.index(normalise_text(answer)) < len(
            self.letters
        ):
            return self.letters[choices.index(normalise_text(answer))]
        match = _LETTER_ANSWER.fullmatch(answer)
        letter = match["letter"].upper() if match else ""
        if match is None or letter not in self.letters:
            return None
        text_after_letter = normalise_text(match["rest"]) if match["rest"] else ""
        if text_after_letter in choices:  # the letter of one choice with the text of another is no answer
            return letter if text_after_letter in choices[self.letters.index(letter) :][:1] else None
        other_letters = self.letters.replace(letter, "")
        details = re.sub(_REJECTION_TEMPLATE.format(other_letters), "", match["rest"])  # (not B); B is wrong
        if _DENIAL_WORD.match(details) or any(choice in other_letters for choice in _find_letters(details)):
            return None
        return letter


def _find_letters(text: str) -> Iterator[str]:
    """Yield the letters in a text that name choices, but not the letters in "a city", "I think" or "Vitamin A"."""
    for match in _LONE_LETTER.finditer(text):
        text_before = text[max(0, match.start() - 10) : match.start()]
        text_after = text[match.end() : match.end() + 10]
        is_word = match.group() in "aAiI" and _NEXT_WORD.match(text_after) and not _JOINER.match(text_after)
        if not is_word and (_CHOICE_MARK_BEFORE.search(text_before) or _CHOICE_MARK_AFTER.match(text_after)):
            yield match.group().upper()


_LONE_LETTER = re.compile(r"(?<![\w'])[A-Za-z](?![\w'])(?! ?[=+*^<>]|\()")  # not the letters of formulas
_NEXT_WORD = re.compile(r" [a-z]{2}")
_JOINER = re.compile(r" (?:or|and|nor|is)\b")
_CHOICE_MARK_BEFORE = re.compile(
    r"(?:\A|[^\w\s'=+*^<>] ?|\b(?:or|and|nor|not|no|but|is|option|choice|answer|maybe|perhaps|than|either) )\Z",
    re.I,
)
_CHOICE_MARK_AFTER = re.compile(r"[)\]:/]|[.;] \S| (?:or|and|nor) ")
_LETTER_ANSWER = re.compile(
    r"(?:(?:the )?(?:correct )?(?:option|choice|answer) (?:is )?)?"
    r"[(\[]?(?P<letter>[A-Z])(?:[)\].:,;]+ ?| - | ?\(| (?=(?:is|because|since|as)\b)|$)(?P<rest>.*)",
    re.I,
)
_REJECTION_TEMPLATE = (
    r"\b(?:not|rather than|instead of) [(\[]?[{0}]\b[)\]]?(?! ?[/,] ?[A-Z]\b)"
    r"|(?<![\w'])[(\[]?[{0}][)\]]? (?:is|was) (?:wrong|incorrect|false|not)\b"
)
_DENIAL_WORD = re.compile(
    r"(?:(?:is|was|can|seems|would be) )?(?:an? |the )?(?:(?:no|not|never|wrong|incorrect|false)\b(?!-)|isn't|can't)",
    re.I,
)
