"""Which part of an episode is its answer, and when two texts are the same.

Only the model's own final text counts. What a tool said is never looked at, and what stands in the reasoning only if
that is asked for.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from TrainingFactory.rewards.checks import check_choice, check_flag
from TrainingFactory.rewards.rules.notation import lowered
from TrainingFactory.rewards.rules.numbers import last_number_text
from TrainingFactory.types import Task, Trajectory

EXTRACTIONS = ("auto", "whole", "marker", "boxed", "tag", "last_line", "last_number")
MAX_BOXES, MAX_BOX_CHARS = 50, 2000  # looked at from the end
MAX_TAGS = 200  # characters of closing tags after an answer
OPENING, CLOSING = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """How the answer is taken from the final text; of several marked ones always the last.

    auto: what is marked in any of the usual ways, else the last line. whole: all of it. marker: what follows a marker
    (`marker`: one or several; else `Answer:`, `The answer is`, `####`). boxed: in \\boxed{}. tag: in <answer></answer>
    (`tag`: another name). last_line, last_number: as they say. `reasoning`: the reasoning counts as text too.
    """

    extract: str = "auto"
    marker: str | Sequence[str] = ()
    tag: str = "answer"
    reasoning: bool = False

    def __post_init__(self) -> None:
        check_choice("extract", self.extract, EXTRACTIONS)
        check_flag("reasoning", self.reasoning)
        if not isinstance(self.tag, str) or not re.fullmatch(r"[A-Za-z][\w-]*", self.tag):
            raise ValueError(f"tag is {self.tag!r}; it must be a name such as answer, without < and >")
        if any(not isinstance(text, str) or not text.strip() for text in self.markers):
            raise ValueError(
                f"marker is {self.marker!r}; it must be a text such as 'Answer:', or a list of texts"
            )
        if self.markers and self.extract not in ("auto", "marker"):
            raise ValueError(f"marker is set, but extract is {self.extract}; set extract to marker")
        if self.tag != Extraction.tag and (self.markers or self.extract not in ("auto", "tag")):
            other = "marker is set too" if self.markers else f"extract is {self.extract}"
            raise ValueError(f"tag is set, but {other}; set extract to tag, and no marker")

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.marker,) if isinstance(self.marker, str) else tuple(self.marker)

    def text_of(self, trajectory: Trajectory) -> str | None:
        """The final text, or None for an episode that did not come to its own end, or ended without a word."""
        if trajectory.status in ("error", "tool_failure"):
            raise ValueError(
                f"the episode ended with status {trajectory.status}: what it is worth is not known"
            )
        if trajectory.status != "done" or not trajectory.turns:
            return None
        content = trajectory.answer
        if not self.reasoning:
            content = without_reasoning(content)
        elif thought := trajectory.turns[-1].message.reasoning:
            content = f"{thought}\n{content}"
        return content.strip() or None

    def answer_in(self, text: str) -> str | None:
        """The answer that the text gives, or None if it gives none in the way asked for."""
        return (self.marked(text) or last_line(text)) if self.extract == "auto" else self._asked(text)

    def marked(self, text: str) -> str | None:
        """The last marked answer, by any of the usual ways, or by the user's markers if there are some."""
        if self.markers:
            return _after_last(text, self.markers)
        found = [_boxed(text), _tagged(text, self.tag), _after_phrase(text)]
        return _only_one(text, max((pair for pair in found if pair is not None), default=None))

    def _asked(self, text: str) -> str | None:
        if self.extract == "boxed":
            pair = _boxed(text)
        elif self.extract == "tag":
            pair = _tagged(text, self.tag)
        elif self.extract == "marker":
            if self.markers:
                return _after_last(text, self.markers)
            pair = _after_phrase(text)
        else:
            other = {"last_line": last_line, "last_number": self.last_number}.get(self.extract)
            return other(text) if other else text
        return _only_one(text, pair)

    def last_number(self, text: str) -> str | None:
        return last_number_text(text)


def without_reasoning(text: str) -> str:
    """The text without <think> blocks. One that was never closed goes on to the end; one that was closed and never
    opened began before the text."""
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
    """The last line that says something, without the mark of a list or a heading."""
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
    found = [(each.start(), each.end()) for each in _PHRASE.finditer(text)][-1:]
    told = text.rstrip()
    heading = told.rfind(
        _HEADING, told.rfind("\n") + 1
    )  # in the last line; elsewhere it is what it looks like
    if heading >= 0:
        found.append((heading, heading + len(_HEADING)))
    if found:
        start, end = max(found)
        if answer := _line_after(text, end):
            return start, answer
    return None


def _after_last(text: str, markers: Sequence[str]) -> str | None:
    small = text.lower()  # some letters change their number in lower case; then letter case counts
    same_size = len(small) == len(text)
    ends = []
    for marker in markers:
        where = small.rfind(marker.lower()) if same_size else text.rfind(marker)
        ends += [where + len(marker)] if where >= 0 else []
    return _line_after(text, max(ends)) if ends else None


def _line_after(text: str, position: int) -> str | None:
    """The rest of the line, or the next one if that is empty; with the line after it if that goes on with `or`."""
    lines = [line.strip() for line in text[position:].splitlines() if re.search(r"\w", line)][:2]
    if not lines:
        return None
    line = " ".join(lines) if _GOES_ON.match(lines[-1]) else lines[0]
    return line[:-MAX_TAGS] + _END_TAG.sub("", line[-MAX_TAGS:])


def _tagged(text: str, tag: str) -> tuple[int, str] | None:
    """What stands in the last pair of tags."""
    small = text.lower()
    if len(small) != len(text):
        small = text
    end = small.rfind(f"</{tag.lower()}>")
    start = small.rfind(f"<{tag.lower()}>", 0, max(end, 0))
    if end < 0 or start < 0:
        return None
    inside = text[start + len(tag) + 2 : end].strip()
    return (start, inside) if inside else None


def _boxed(text: str) -> tuple[int, str] | None:
    """What stands in the last \\boxed{...} with balanced braces, and a minus before it."""
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


def _only_one(text: str, marked: tuple[int, str] | None) -> str | None:
    """What is marked at a place in the text, unless it is one of a choice: Answer: 5 or Answer: 7."""
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


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for position in range(start, min(len(text), start + MAX_BOX_CHARS)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position
    return None


def references(task: Task, rule: str) -> list[Any]:
    """The right answers of a task, one or several; raises where there is none, because nothing can be scored then."""
    answers = list(task.answer) if isinstance(task.answer, list | tuple) else [task.answer]
    blank = [
        answer for answer in answers if answer is None or (isinstance(answer, str) and not answer.strip())
    ]
    if not answers or blank:
        raise ValueError(f"task {task.id} has no answer to compare with, so the rule {rule} cannot score it")
    return answers


def normalised(text: str) -> str:
    """Letter case, Unicode forms, runs of spaces, emphasis, and quotes and full stops around it do not matter."""
    text = unicodedata.normalize("NFKC", lowered(text)).casefold().translate(_QUOTES)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]{0,200})\}", r"\1", text)
    text = " ".join(text.replace("**", "").split())
    inside = text.lstrip(_AROUND)
    if inside[:1].isdigit() and _POINT.search(text[: len(text) - len(inside)]):
        inside = text[len(text) - len(inside) - 1 :]  # .5 is not 5
    return inside.rstrip(_AROUND) or text


_AROUND = " \"'`*_.,;:!?()[]$"
_POINT = re.compile(r"(?<![.,])[.,]\Z")


_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u2212", "''\"\"---")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation + "\u2018\u2019\u201c\u201d")
# Without these 1.5 would be 15, 3-4 would be 34, 5e-3 would be 5e3, and -7 would be 7. They are put where no
# punctuation is; only thousands are written with and without their marks.
_DASHES = "\u2212\u2013"
_MARK = f"[{re.escape(string.punctuation)}{_DASHES}]"
_IN_NUMBER = re.compile(
    r"(?<=\d)(?:(?<!\d{4})(?<!(?<!\d)0)[,'_](?=\d{3}(?!\d))(?P<thousands>)|" + _MARK + r"+(?=\d))"
    r"|(?<=\de)[-\u2212](?=\d)|(?<![\w)])[-\u2212](?=\.?\d)|(?<!\w)\.(?=\d)"
)
_KEPT = {ord(mark): 0xE000 + ord(mark) for mark in string.punctuation}
_KEPT |= {ord(dash): _KEPT[ord("-")] for dash in _DASHES}


def squad_words(text: str) -> list[str]:
    """The words as SQuAD compares them: lower case, without punctuation and articles. A text of nothing else keeps
    them: `The` and `A` are different answers. So does a number: 1.5 and 15 are too."""
    small = unicodedata.normalize("NFKC", lowered(text)).lower()
    bare = _IN_NUMBER.sub(_kept, small).translate(_PUNCTUATION)
    return _ARTICLES.sub(" ", bare).split() or bare.split() or small.split()


def _kept(mark: re.Match[str]) -> str:
    return "" if mark["thousands"] is not None else mark.group().translate(_KEPT)
