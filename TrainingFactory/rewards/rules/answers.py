"""Find the answer in an episode, and hold what the rules that compare it with the right ones have in common.

Only the model's own final text counts: never what a tool said, nor what stands in the reasoning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import check_known
from TrainingFactory.rewards.rules.numbers import last_number_text
from TrainingFactory.types import Reward, Task, Trajectory

MAX_BOXES, MAX_BOX_CHARS = 50, 2000  # looked at from the end
MAX_TAGS = 200  # characters of closing tags after an answer
OPENING, CLOSING = "<think>", "</think>"
Extract = Literal["auto", "whole", "marker", "boxed", "tag", "last_line", "last_number"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FinalText:
    """Look at the final text of an episode."""

    rule: ClassVar[str]

    def text_of(self, trajectory: Trajectory) -> str | None:
        """Return the final text; None for an episode that did not come to its own end, or ended without a word."""
        check_known(trajectory)
        if trajectory.status != "done" or not trajectory.turns:
            return None
        return without_reasoning(trajectory.answer).strip() or None

    def rewarded(self, outcome: float) -> Reward:
        return Reward(float(outcome), parts={self.rule: float(outcome)})


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Extraction(FinalText):
    """Take the answer from the final text; of several marked ones always the last."""

    # auto: what is marked in any of these ways, else the last line. marker: `Answer:`, `The answer is` or `####`.
    # boxed: \\boxed{}. tag: <answer></answer>.
    extract: Extract = "auto"

    def answer_of(self, trajectory: Trajectory) -> str | None:
        """Return the answer that the episode gives in the way asked for, or None."""
        text = self.text_of(trajectory)
        return None if text is None else self.answer_in(text)

    def answer_in(self, text: str) -> str | None:
        """Return the answer that the text gives in the way asked for, or None."""
        match self.extract:
            case "auto":
                return marked(text) or last_line(text)
            case "marker":
                return _only_one(text, _after_phrase(text))
            case "boxed":
                return _only_one(text, _boxed(text))
            case "tag":
                return _only_one(text, _tagged(text))
            case "last_line":
                return last_line(text)
            case "last_number":
                return last_number_text(text, getattr(self, "decimal_comma", False))
        return text


@lru_cache(maxsize=1)  # asked twice about each answer
def marked(text: str) -> str | None:
    """Return the last marked answer, by any of the usual ways."""
    found = [_boxed(text), _tagged(text), _after_phrase(text)]
    return _only_one(text, max((pair for pair in found if pair is not None), default=None))


def references(task: Task, rule: str) -> list[Any]:
    """Return the right answers of a task, one or several; ValueError if there is none to score by."""
    answers = list(task.answer) if isinstance(task.answer, list | tuple) else [task.answer]
    blank = any(answer is None or (isinstance(answer, str) and not answer.strip()) for answer in answers)
    if not answers or blank:
        raise ValueError(f"task {task.id} has no answer to compare with, so the rule {rule} cannot score it")
    return answers


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ReferenceRule(Extraction):
    """Compare with the task's right answers: one without any cannot be scored."""

    # Where nothing is marked, the answer may be the last line or all of the text: right is whichever is.
    whole_too: ClassVar[bool] = True

    def right_answers(self, episode: Episode) -> list[Any]:
        """Return the right answers as `read_reference` gives them; ValueError that names the task if there is none."""
        right = references(episode.task, self.rule)
        try:
            return [self.read_reference(reference) for reference in right]
        except (ValueError, TypeError) as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error

    def read_reference(self, reference: Any) -> Any:
        """Return a right answer in the form that is compared; ValueError if this rule cannot compare with it."""
        return str(reference)

    def answers_of(self, episode: Episode) -> Sequence[str]:
        """Return the texts that may be the answer: none for an episode that did not come to its own end."""
        text = self.text_of(episode.trajectory)
        if text is None:
            return []
        answers = [self.answer_in(text)]
        if self.extract == "auto" and self.whole_too and not marked(text):
            answers.append(text)
        return [answer for answer in answers if answer]


class AnswerRule(ReferenceRule):
    """Compare one answer with one right answer; the best pair counts, and no answer is worth 0."""

    quick = True  # it compares two short texts: a thread would take longer

    def __call__(self, episode: Episode) -> Reward:
        right = self.right_answers(episode)
        scores = [self.score(answer, one) for answer in self.answers_of(episode) for one in right]
        return self.rewarded(max(scores, default=0.0))

    def score(self, answer: str, reference: Any) -> float:
        raise NotImplementedError


def without_reasoning(text: str) -> str:
    """Return the text without <think> blocks, also those that were never closed, or never opened."""
    if OPENING not in text and CLOSING not in text:
        return text
    kept: list[str] = []
    inside = False
    for piece in re.split(f"({OPENING}|{CLOSING})", text):
        if piece == CLOSING and not inside:
            kept.clear()
        elif piece in (OPENING, CLOSING):
            inside = piece == OPENING
        elif not inside:
            kept.append(piece)
    return "".join(kept)


def last_line(text: str) -> str | None:
    """Return the last line that says something, without the mark of a list or a heading."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    return _ITEM.sub("", lines[-1]) if lines else None


_ITEM = re.compile(r"^(?:[-*•>]|#+)\s+(?=\S)")
_END_TAG = re.compile(r"(?:</[A-Za-z][\w-]{0,30}>\s?)+$")
# Runs of spaces have a limit: without one a text of nothing else would take for ever.
_PHRASE = re.compile(
    r"\b(?:final\s{1,20})?answer(?:\s{1,20}is)?\s{0,20}(?:\*\*|__)?\s{0,20}[:=]\s{0,20}(?:\*\*|__)?"
    r"|\banswer\s{1,20}is\b"
    r"|答案(?:是\s{0,20}[::]?|\s{0,20}[::])".replace("::", ":\uff1a"),
    re.I,
)
_HEADING = "####"
_GOES_ON = re.compile(r"\W{0,5}or\b", re.I)


def _after_phrase(text: str) -> tuple[int, str] | None:
    found = [each.span() for each in _PHRASE.finditer(text)][-1:]
    told = text.rstrip()
    # in the last line; elsewhere it is what it looks like
    heading = told.rfind(_HEADING, told.rfind("\n") + 1)
    if heading >= 0:
        found.append((heading, heading + len(_HEADING)))
    if found:
        start, end = max(found)
        if answer := _line_after(text, end):
            return start, answer
    return None


def _line_after(text: str, position: int) -> str | None:
    """Return the rest of the line, or the next one if it is empty; with the line after it if that goes on with `or`."""
    lines = [line.strip() for line in text[position:].splitlines() if re.search(r"\w", line)][:2]
    if not lines:
        return None
    line = " ".join(lines) if _GOES_ON.match(lines[-1]) else lines[0]
    return line[:-MAX_TAGS] + _END_TAG.sub("", line[-MAX_TAGS:])


def _tagged(text: str) -> tuple[int, str] | None:
    """Return what stands in the last pair of tags, and where."""
    *_, closing = [None, *re.finditer("</answer>", text, re.I)]
    *_, opening = [None, *re.finditer("<answer>", text[: closing.start()] if closing else "", re.I)]
    if closing is None or opening is None:
        return None
    inside = text[opening.end() : closing.start()].strip()
    return (opening.start(), inside) if inside else None


def _boxed(text: str) -> tuple[int, str] | None:
    """Return what stands in the last \\boxed{...} with balanced braces, with a minus before it, and where."""
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?\s?\{", text))[-MAX_BOXES:]):
        end = _closing_brace(text, match.end())
        if end is not None and (inside := text[match.end() : end].strip()):
            minus = _MINUS_BEFORE.search(text[max(0, match.start() - 24) : match.start()])
            return match.start(), f"-{inside}" if minus else inside
    return None


# -\boxed{5} and = - \boxed{5}; not x-\boxed{5}, and not the mark of a list or a dash: the sum - \boxed{5}
_MINUS_BEFORE = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212\u2013]|[=:({$\[\u2248]\s*[-\u2212\u2013]\s+)(?:\\left|\\[,;:!]|[$({\[])*\Z"
)


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for position in range(start, min(len(text), start + MAX_BOX_CHARS)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position
    return None


def _only_one(text: str, marked: tuple[int, str] | None) -> str | None:
    """Return what is marked at a place in the text, unless it is one of a choice: Answer: 5 or Answer: 7."""
    if marked is None:
        return None
    start, answer = marked
    before = _MARKED_OR.get(text[start], _MARKED_OR["A"])
    return None if before.search(text[max(0, start - 150) : start]) else answer


_BETWEEN = r"[\s$.,;)*]{0,6}\bor\b[^\n<\\{}\d]{0,30}\Z"
_MARKED_OR = {  # by the first character of \boxed, <answer> and Answer:
    "\\": re.compile(r"\\f?box(?:ed)?\s?\{[^{}]{0,60}\}" + _BETWEEN, re.I),
    "<": re.compile(r"</[\w-]{1,30}>" + _BETWEEN, re.I),
    "A": re.compile(r"\banswer\b[^\n<\\]{1,60}\s?\bor\b\W{0,6}(?:(?:the|my|final|correct) ){0,4}\Z", re.I),
}
