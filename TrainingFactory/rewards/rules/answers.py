"""Answer extraction, and base classes of the rules that compare answers with references.

Only the model's final text counts, never tool results or reasoning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import check_scorable
from TrainingFactory.rewards.rules.numbers import find_last_number
from TrainingFactory.types import Reward, Task, Trajectory

MAX_BOXES = 50  # boxes that are searched, from the end
MAX_BOX_CHARS = 2000
MAX_TAG_CHARS = 200  # of closing tags after an answer
THINK_START, THINK_END = "<think>", "</think>"
ExtractMode = Literal["auto", "whole", "marker", "boxed", "tag", "last_line", "last_number"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class FinalTextRule:
    """Base of rules about the final text of an episode."""

    rule: ClassVar[str]

    def get_final_text(self, trajectory: Trajectory) -> str | None:
        """Return the final text; None for an episode that did not finish by itself, or without text."""
        check_scorable(trajectory)
        if trajectory.status != "done" or not trajectory.turns:
            return None
        return without_reasoning(trajectory.answer).strip() or None

    def make_reward(self, outcome: float) -> Reward:
        return Reward(float(outcome), parts={self.rule: float(outcome)})


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ExtractionRule(FinalTextRule):
    """Base of rules that extract an answer from the final text; of several marked answers, the last one counts."""

    # marker: `Answer:`, `The answer is` or `####`. boxed: \\boxed{}. tag: <answer></answer>. auto: any of these, else
    # the last line.
    extract: ExtractMode = "auto"

    def extract_final_answer(self, trajectory: Trajectory) -> str | None:
        """Extract the answer from the episode's final text; return None if there is none."""
        text = self.get_final_text(trajectory)
        return None if text is None else self.extract_answer(text)

    def extract_answer(self, text: str) -> str | None:
        """Extract the answer from a text by the method `extract`; return None if there is none."""
        match self.extract:
            case "auto":
                return find_marked_answer(text) or find_last_line(text)
            case "marker":
                return _reject_ambiguous(text, _find_text_after_phrase(text))
            case "boxed":
                return _reject_ambiguous(text, _find_boxed_text(text))
            case "tag":
                return _reject_ambiguous(text, _find_tagged_text(text))
            case "last_line":
                return find_last_line(text)
            case "last_number":
                return find_last_number(text, getattr(self, "decimal_comma", False))
        return text


@lru_cache(maxsize=1)  # called twice for each answer
def find_marked_answer(text: str) -> str | None:
    """Return the last answer that is boxed, tagged or marked by a phrase; None if there is none."""
    candidates = [_find_boxed_text(text), _find_tagged_text(text), _find_text_after_phrase(text)]
    return _reject_ambiguous(text, max((pair for pair in candidates if pair is not None), default=None))


def get_references(task: Task, rule_name: str) -> list[Any]:
    """Return the reference answers of a task, one or several; raise ValueError if it has none."""
    answers = list(task.answer) if isinstance(task.answer, list | tuple) else [task.answer]
    has_blank = any(answer is None or (isinstance(answer, str) and not answer.strip()) for answer in answers)
    if not answers or has_blank:
        raise ValueError(f"task {task.id} has no answer to compare with, which the rule {rule_name} needs")
    return answers


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ReferenceRule(ExtractionRule):
    """Base of rules that compare with the task's reference answers. A task without reference answers cannot be
    scored."""

    # Without a marked answer, both the last line and the whole text are tried, and the better score counts.
    tries_whole_text: ClassVar[bool] = True

    def parse_references(self, episode: Episode) -> list[Any]:
        """Parse the task's reference answers; raise ValueError if there are none or one is invalid."""
        references = get_references(episode.task, self.rule)
        try:
            return [self.parse_reference(reference) for reference in references]
        except (ValueError, TypeError) as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error

    def parse_reference(self, reference: Any) -> Any:
        """Parse a reference answer; raise ValueError if the rule cannot compare with it."""
        return str(reference)

    def extract_candidates(self, episode: Episode) -> Sequence[str]:
        """Return the candidate answers; none for an episode that did not finish by itself."""
        text = self.get_final_text(episode.trajectory)
        if text is None:
            return []
        answers = [self.extract_answer(text)]
        if self.extract == "auto" and self.tries_whole_text and not find_marked_answer(text):
            answers.append(text)
        return [answer for answer in answers if answer]


class AnswerRule(ReferenceRule):
    """Base of rules that compare one answer with one reference; the best pair counts, and no answer scores 0."""

    runs_inline = True  # comparing two short texts is faster than starting a thread

    def __call__(self, episode: Episode) -> Reward:
        references = self.parse_references(episode)
        scores = [
            self.score(answer, reference)
            for answer in self.extract_candidates(episode)
            for reference in references
        ]
        return self.make_reward(max(scores, default=0.0))

    def score(self, answer: str, reference: Any) -> float:
        raise NotImplementedError


def without_reasoning(text: str) -> str:
    """Return the text without <think> blocks, including unclosed and unopened ones."""
    if THINK_START not in text and THINK_END not in text:
        return text
    segments: list[str] = []
    is_inside_block = False
    for segment in re.split(f"({THINK_START}|{THINK_END})", text):
        if segment == THINK_END and not is_inside_block:
            segments.clear()
        elif segment in (THINK_START, THINK_END):
            is_inside_block = segment == THINK_START
        elif not is_inside_block:
            segments.append(segment)
    return "".join(segments)


def find_last_line(text: str) -> str | None:
    """Return the last line that contains a word, without a list or heading marker."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    return _LIST_MARKER.sub("", lines[-1]) if lines else None


_LIST_MARKER = re.compile(r"^(?:[-*•>]|#+)\s+(?=\S)")
_CLOSING_TAGS = re.compile(r"(?:</[A-Za-z][\w-]{0,30}>\s?)+$")
# Runs of spaces are limited to avoid catastrophic backtracking.
_ANSWER_PHRASE = re.compile(
    r"\b(?:final\s{1,20})?answer(?:\s{1,20}is)?\s{0,20}(?:\*\*|__)?\s{0,20}[:=]\s{0,20}(?:\*\*|__)?"
    r"|\banswer\s{1,20}is\b"
    r"|答案(?:是\s{0,20}[::]?|\s{0,20}[::])".replace("::", ":\uff1a"),
    re.I,
)
_ANSWER_MARK = "####"
_OR_CONTINUATION = re.compile(r"\W{0,5}or\b", re.I)


def _find_text_after_phrase(text: str) -> tuple[int, str] | None:
    """Return the position and the answer of the last phrase such as `Answer:`, or of `####` in the last line."""
    phrase_spans = [match.span() for match in _ANSWER_PHRASE.finditer(text)][-1:]
    clean_text = text.rstrip()
    heading_start = clean_text.rfind(_ANSWER_MARK, clean_text.rfind("\n") + 1)  # elsewhere, #### is a heading
    if heading_start >= 0:
        phrase_spans.append((heading_start, heading_start + len(_ANSWER_MARK)))
    if phrase_spans:
        phrase_start, phrase_end = max(phrase_spans)
        if answer := _find_line_after(text, phrase_end):
            return phrase_start, answer
    return None


def _find_line_after(text: str, position: int) -> str | None:
    """Return the first non-empty line from the position on, and also the next line if that starts with `or`."""
    lines = [line.strip() for line in text[position:].splitlines() if re.search(r"\w", line)][:2]
    if not lines:
        return None
    line = " ".join(lines) if _OR_CONTINUATION.match(lines[-1]) else lines[0]
    return line[:-MAX_TAG_CHARS] + _CLOSING_TAGS.sub("", line[-MAX_TAG_CHARS:])


def _find_tagged_text(text: str) -> tuple[int, str] | None:
    """Return the position and the content of the last <answer> tag."""
    *_, end_tag = [None, *re.finditer("</answer>", text, re.I)]
    *_, start_tag = [None, *re.finditer("<answer>", text[: end_tag.start()] if end_tag else "", re.I)]
    if end_tag is None or start_tag is None:
        return None
    content = text[start_tag.end() : end_tag.start()].strip()
    return (start_tag.start(), content) if content else None


def _find_boxed_text(text: str) -> tuple[int, str] | None:
    """Return the position and the content of the last balanced \\boxed{...}, with a minus sign before the box."""
    for match in reversed(list(re.finditer(r"\\f?box(?:ed)?\s?\{", text))[-MAX_BOXES:]):
        box_end = _find_closing_brace(text, match.end())
        if box_end is not None and (content := text[match.end() : box_end].strip()):
            minus_match = _MINUS_BEFORE.search(text[max(0, match.start() - 24) : match.start()])
            return match.start(), f"-{content}" if minus_match else content
    return None


# -\boxed{5} and = - \boxed{5}; not x-\boxed{5}, and not a list marker or a dash: the sum - \boxed{5}
_MINUS_BEFORE = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212\u2013]|[=:({$\[\u2248]\s*[-\u2212\u2013]\s+)(?:\\left|\\[,;:!]|[$({\[])*\Z"
)


def _find_closing_brace(text: str, content_start: int) -> int | None:
    depth = 1
    for position in range(content_start, min(len(text), content_start + MAX_BOX_CHARS)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position
    return None


def _reject_ambiguous(text: str, candidate: tuple[int, str] | None) -> str | None:
    """Return the answer of a (position, answer) pair; None if it is one of several: Answer: 5 or Answer: 7."""
    if candidate is None:
        return None
    position, answer = candidate
    pattern = _ALTERNATIVE_BEFORE.get(text[position], _ALTERNATIVE_BEFORE["A"])
    return None if pattern.search(text[max(0, position - 150) : position]) else answer


_OR_BEFORE = r"[\s$.,;)*]{0,6}\bor\b[^\n<\\{}\d]{0,30}\Z"
_ALTERNATIVE_BEFORE = {  # by the first character of \boxed, <answer> and Answer:
    "\\": re.compile(r"\\f?box(?:ed)?\s?\{[^{}]{0,60}\}" + _OR_BEFORE, re.I),
    "<": re.compile(r"</[\w-]{1,30}>" + _OR_BEFORE, re.I),
    "A": re.compile(r"\banswer\b[^\n<\\]{1,60}\s?\bor\b\W{0,6}(?:(?:the|my|final|correct) ){0,4}\Z", re.I),
}
