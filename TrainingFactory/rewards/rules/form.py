"""Rules about the form of an answer: JSON, patterns, required parts, length."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import regex
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.checks import check_choice, check_flag, check_number
from TrainingFactory.rewards.rules.answers import Extraction, references
from TrainingFactory.rewards.rules.base import AnswerRule, paid
from TrainingFactory.tools.schema import unknown_reference, validator_of
from TrainingFactory.types import Reward, Trajectory

MAX_JSON_CHARS = 200_000
_FENCED = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.S)
_NOTHING: Any = object()


def last_fenced(text: str) -> str | None:
    """The last block between ``` lines."""
    blocks = _FENCED.findall(text)
    return blocks[-1].strip() if blocks else None


def read_json(text: str) -> Any:
    """The JSON value that a text is, or that its last fenced block is; `_NOTHING` if there is none. A key that occurs
    twice and NaN are no JSON here: what they mean depends on the reader."""
    value = strict_json(text)
    return strict_json(last_fenced(text) or "") if value is _NOTHING else value


def strict_json(text: str) -> Any:
    """All of the text as JSON, or `_NOTHING`."""
    try:
        if len(text) <= MAX_JSON_CHARS:
            return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    return _NOTHING


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@dataclass(frozen=True, kw_only=True)
class JsonMatch(AnswerRule):
    """The same JSON value as the task's answer; text that is JSON is read. `partial`: for objects the share of the
    right keys. `extra_keys`: further keys do no harm. `ordered: false`: lists in any order."""

    rule: ClassVar[str] = "json"
    extract: str = "whole"
    tolerance: float = 1e-9
    extra_keys: bool = False
    ordered: bool = True
    partial: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("tolerance", self.tolerance)
        for name in ("extra_keys", "ordered", "partial"):
            check_flag(name, getattr(self, name))

    def __call__(self, episode: Episode) -> Reward:
        right = episode.task.answer
        if isinstance(right, str):
            right = read_json(right)
        if right is None or right is _NOTHING:
            raise ValueError(
                f"task {episode.task.id}: its answer is no JSON value, so the rule json cannot score it"
            )
        text = self.text_of(episode.trajectory)
        answer = self.answer_in(text) if text is not None else None
        given = read_json(answer) if answer else _NOTHING
        return paid(self.rule, 0.0 if given is _NOTHING else self._share(given, right))

    def _share(self, given: Any, right: Any) -> float:
        if not self.partial or not isinstance(right, dict) or not isinstance(given, dict) or not right:
            return float(self._same(given, right))
        hits = sum(key in given and self._same(given[key], value) for key, value in right.items())
        keys = len(right) if self.extra_keys else len(right.keys() | given.keys())
        return hits / keys

    def _same(self, given: Any, right: Any) -> bool:
        if isinstance(given, bool) or isinstance(right, bool):
            return given is right  # true is not 1
        if isinstance(given, int | float) and isinstance(right, int | float):
            if isinstance(given, int) and isinstance(right, int):
                return given == right
            try:
                return math.isclose(given, right, rel_tol=self.tolerance, abs_tol=self.tolerance)
            except OverflowError:  # a whole number that no float can hold
                return False
        if isinstance(given, dict) and isinstance(right, dict):
            keys = right.keys() <= given.keys() if self.extra_keys else right.keys() == given.keys()
            return keys and all(self._same(given[key], value) for key, value in right.items())
        if isinstance(given, list) and isinstance(right, list):
            return len(given) == len(right) and self._same_items(given, right)
        return type(given) is type(right) and given == right

    def _same_items(self, given: list[Any], right: list[Any]) -> bool:
        if self.ordered:
            return all(map(self._same, given, right))
        left = list(given)
        for value in right:
            found = next((place for place, item in enumerate(left) if self._same(item, value)), None)
            if found is None:
                return False
            left.pop(found)
        return True


@dataclass(frozen=True, kw_only=True)
class SchemaMatch(Extraction):
    """The answer is JSON of the given schema. Whether it is right is another rule's business."""

    rule: ClassVar[str] = "schema"
    extract: str = "whole"
    schema: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            validator_for(self.schema, default=type(validator_of({}))).check_schema(self.schema)
        except (SchemaError, TypeError, AttributeError) as error:
            said = getattr(error, "message", str(error))
            raise ValueError(f"schema is no JSON schema ({str(said)[:120]})") from error
        if unknown := unknown_reference(self.schema):
            raise ValueError(f"schema refers to {unknown}, which is not in it")

    def __call__(self, episode: Episode) -> Reward:
        text = self.text_of(episode.trajectory)
        answer = self.answer_in(text) if text is not None else None
        given = read_json(answer) if answer else _NOTHING
        try:
            return paid(self.rule, float(given is not _NOTHING and validator_of(self.schema).is_valid(given)))
        except (OverflowError, RecursionError):  # a number or a depth that cannot be checked
            return paid(self.rule, 0.0)


@dataclass(frozen=True, kw_only=True)
class Pattern(Extraction):
    """The answer matches a regular expression: `pattern`, else the task's answer. `full`: as a whole. A search that
    takes longer than `timeout` seconds has no result, so the episode is not scored."""

    rule: ClassVar[str] = "regex"
    extract: str = "whole"
    pattern: str | None = None
    full: bool = False
    ignore_case: bool = False
    timeout: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("full", self.full)
        check_flag("ignore_case", self.ignore_case)
        check_number("timeout", self.timeout, low=1e-3)
        if self.pattern is not None:
            compiled(self.pattern, self.ignore_case)

    def __call__(self, episode: Episode) -> Reward:
        patterns = [self.pattern] if self.pattern is not None else references(episode.task, self.rule)
        text = self.text_of(episode.trajectory)
        answer = self.answer_in(text) if text is not None else None
        try:
            ready = [compiled(str(pattern), self.ignore_case) for pattern in patterns]
            hit = answer is not None and any(matches(one, answer, self.full, self.timeout) for one in ready)
        except ValueError as error:
            raise ValueError(f"task {episode.task.id}: {error}") from error
        return paid(self.rule, float(hit))


def compiled(pattern: Any, ignore_case: bool = False) -> Any:
    try:
        return regex.compile(pattern, regex.DOTALL | (regex.IGNORECASE if ignore_case else 0))
    except (regex.error, TypeError) as error:
        raise ValueError(f"pattern {str(pattern)[:80]!r} is no regular expression: {error}") from error


def matches(pattern: Any, text: str, full: bool, timeout: float) -> bool:
    """With the interpreter's lock released, so that a slow search holds up nobody else."""
    search = pattern.fullmatch if full else pattern.search
    try:
        return search(text, timeout=timeout, concurrent=True) is not None
    except TimeoutError:
        raise ValueError(f"pattern {pattern.pattern[:80]!r} took longer than {timeout:g} s") from None


@dataclass(frozen=True, kw_only=True)
class Format(Extraction):
    """The final text has the asked form: it matches `pattern` as a whole, and has the `require`d parts. `partial`: the
    share of them that are there. Whether the answer is right is another rule's business."""

    rule: ClassVar[str] = "format"
    pattern: str | None = None
    require: Sequence[str] = ()
    partial: bool = False
    timeout: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_extraction(self, "extract")
        check_flag("partial", self.partial)
        check_number("timeout", self.timeout, low=1e-3)
        if isinstance(self.require, str):
            raise ValueError(f"require is {self.require!r}; it must be a list of {', '.join(PARTS)}")
        for part in self.require:
            check_choice("require", part, PARTS)
        if self.pattern is None and not self.require:
            raise ValueError("the rule format needs a pattern, or a list of parts in require")
        if self.pattern is not None:
            compiled(self.pattern)

    def __call__(self, episode: Episode) -> Reward:
        trajectory = episode.trajectory
        text = self.text_of(trajectory)
        if text is None:
            return paid(self.rule, 0.0)
        there = [PARTS[part](trajectory, text, self) for part in self.require]
        if self.pattern is not None:
            there.append(matches(compiled(self.pattern), text, True, self.timeout))
        return paid(self.rule, sum(there) / len(there) if self.partial else float(all(there)))


def _refuse_extraction(rule: Format | Length, *names: str) -> None:
    """Where the final text is looked at as a whole, they would do nothing."""
    for name in names:
        if getattr(rule, name) != getattr(Extraction, name):
            raise ValueError(f"the rule {rule.rule} looks at the whole final text; leave {name} out")


def _called(trajectory: Trajectory, text: str, asked: Extraction) -> bool:
    """Before the final text: a call beside the answer has not informed it."""
    return any(call.error is None for turn in trajectory.turns[:-1] for call in turn.message.tool_calls)


def _marked(trajectory: Trajectory, text: str, asked: Extraction) -> bool:
    return asked.marked(text) is not None


def _reasoned(trajectory: Trajectory, text: str, asked: Extraction) -> bool:
    return bool((trajectory.turns[-1].message.reasoning or "").strip())


def _readable_calls(trajectory: Trajectory, text: str, asked: Extraction) -> bool:
    return all(call.error is None for turn in trajectory.turns for call in turn.message.tool_calls)


def _is_json(trajectory: Trajectory, text: str, asked: Extraction) -> bool:
    return read_json(text) is not _NOTHING


PARTS: dict[str, Callable[[Trajectory, str, Extraction], bool]] = {
    "tool_call": _called,
    "marked_answer": _marked,
    "reasoning": _reasoned,
    "readable_calls": _readable_calls,
    "json": _is_json,
}


@dataclass(frozen=True, kw_only=True)
class Length(Extraction):
    """1 up to `soft`, from there down to 0 at `hard`; 0 under `least`, and for an episode without an answer. `unit`:
    tokens and turns of the whole episode, words and characters of the final text."""

    rule: ClassVar[str] = "length"
    soft: float
    hard: float
    least: float = 0
    unit: str = "tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_extraction(self, "extract", "marker", "tag")
        check_choice("unit", self.unit, ("tokens", "turns", "words", "characters"))
        check_number("least", self.least)
        check_number("soft", self.soft, low=self.least)
        check_number("hard", self.hard, low=self.soft)

    def __call__(self, episode: Episode) -> Reward:
        text = self.text_of(episode.trajectory)
        if text is None:
            return paid(self.rule, 0.0)
        length = self._measured(episode.trajectory, text)
        if length <= self.soft:
            return paid(self.rule, float(length >= self.least))
        return paid(
            self.rule, max(0.0, (self.hard - length) / (self.hard - self.soft)) if length < self.hard else 0.0
        )

    def _measured(self, trajectory: Trajectory, text: str) -> int:
        if self.unit == "tokens":
            return sum(len(turn.completion.token_ids) for turn in trajectory.turns)
        if self.unit == "turns":
            return len(trajectory.turns)
        return len(text.split()) if self.unit == "words" else len(text)
