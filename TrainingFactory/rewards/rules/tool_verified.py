"""`reward.type: tool_verified`: what the model says at the end is run, and what comes of it decides."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from TrainingFactory.common.arithmetic import calculate, tokens
from TrainingFactory.common.options import STRICT, make_named
from TrainingFactory.common.sql.compare import Ask
from TrainingFactory.protocols import Episode, RewardFunction
from TrainingFactory.rewards.rules.answers import references
from TrainingFactory.rewards.rules.code import CodeTests, ToolRule, through, value_after
from TrainingFactory.rewards.rules.json_answers import same_json
from TrainingFactory.rewards.rules.numbers import Number, plain
from TrainingFactory.rewards.rules.numeric import Numeric
from TrainingFactory.rewards.rules.rule_based import rule_from_options
from TrainingFactory.rewards.rules.sql import SqlExecution
from TrainingFactory.types import Reward, Task


@dataclass(frozen=True)
class Case:
    args: list[Any]
    expected: Any


CASES = TypeAdapter(Annotated[list[Case], Field(min_length=1)])


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CodeCases(ToolRule):
    """Reward a function, `entry`, by the cases in the task's metadata. Only arguments are sent to the tool: code that
    looks for the expected values, or returns an object that equals everything, gains nothing."""

    rule: ClassVar[str] = "code_cases"
    entry: str = ""
    partial: bool = False

    async def __call__(self, episode: Episode) -> Reward:
        task = episode.task
        entry = task.metadata.get("entry", self.entry)
        if not isinstance(entry, str) or not re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", entry):
            raise ValueError(
                f"task {task.id}: entry is {entry!r}; it must be the name of the function to call"
            )
        cases = _cases(task)
        code = self.code_of(episode)
        if not code:
            return self.rewarded(0.0)
        ask = through(episode, self.tool, "code")
        passed: list[bool] = []
        if not self.partial:  # code that never ends is stopped once, not once for every case
            first, *cases = cases
            passed = [await self._passes(ask, code, entry, *first)]
            cases = cases if passed[0] else []
        passed += await asyncio.gather(*(self._passes(ask, code, entry, *case) for case in cases))
        return self.rewarded(sum(passed) / len(passed) if self.partial else all(passed))

    async def _passes(self, ask: Ask, code: str, entry: str, args: list[Any], expected: Any) -> bool:
        sent = json.dumps(json.dumps(args))
        shown = f"_json.dumps({entry}(*_json.loads({sent})))"
        size = len(json.dumps(expected))
        said = await value_after(ask, f"{code}\n\nimport json as _json", shown, expected=size)
        try:
            return said is not None and same_json(json.loads(said), expected)
        except (ValueError, RecursionError):
            return False


def _cases(task: Task) -> list[tuple[list[Any], Any]]:
    """Return the arguments and the expected result of each case, with lists for tuples as JSON has it."""
    try:
        cases = CASES.validate_python(task.metadata.get("cases"))
    except ValidationError as error:
        like = '[{"args": [2], "expected": 4}, ...]'
        raise ValueError(f"task {task.id}: cases in its metadata must be a list such as {like}") from error
    return [(case.args, json.loads(json.dumps(case.expected))) for case in cases]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class Calculated(Numeric):
    """Reward the number that the calculator gives for the task's metadata `expression`, else the task's answer. With
    `expressions` one such as (3+5)*4 is an answer too, of the metadata's `numbers`, each once, if there are any."""

    rule: ClassVar[str] = "calculated"
    expressions: bool = False

    def __call__(self, episode: Episode) -> Reward:
        task = episode.task
        try:
            right = self._right(task)
            numbers = _numbers(task) if self.expressions else None
        except (ValueError, TypeError, ZeroDivisionError, RecursionError) as error:
            raise ValueError(f"task {task.id}: {error}") from error
        answers = self.answers_of(episode)
        if numbers is not None:
            answers = [answer for answer in answers if _made_of(answer, numbers)]
        return self.rewarded(
            max((self.score(answer, one) for answer in answers for one in right), default=0.0)
        )

    def _right(self, task: Task) -> list[Number]:
        if (expression := task.metadata.get("expression")) is not None:
            return [Number(calculate(str(expression)))]
        return [self.read_reference(reference) for reference in references(task, self.rule)]

    def score(self, answer: str, reference: Number) -> float:
        values = _calculated(answer) if self.expressions else {}
        return (
            float(set(values.values()) == {reference.value}) if values else super().score(answer, reference)
        )


def _calculated(answer: str) -> dict[str, Fraction]:
    """Return the value of each side of an equation, or of the only side; nothing for other texts."""
    try:
        return {side: calculate(side) for side in plain(answer).strip(" .").split("=")}
    except (ValueError, ZeroDivisionError, RecursionError):
        return {}


def _numbers(task: Task) -> Counter[Fraction] | None:
    """Return what may stand in an expression; None: anything."""
    listed = task.metadata.get("numbers")
    return None if listed is None else Counter(Fraction(str(number)) for number in listed)


def _made_of(answer: str, numbers: Counter[Fraction]) -> bool:
    """Return whether the answer, or a side of it, is an expression with no other numbers, and none twice."""
    used = [Counter(map(Fraction, filter(_DIGIT.search, tokens(side)))) for side in _calculated(answer)]
    return any(side and side <= numbers for side in used)


_DIGIT = re.compile(r"\d")

VERIFIERS: dict[str, Any] = {kind.rule: kind for kind in (SqlExecution, CodeCases, CodeTests, Calculated)}


def make_verifier(verify: str, **options: Any) -> RewardFunction:
    """Make a reward by its name in VERIFIERS and the options of its class; ValueError for one that is not there."""
    return make_named(VERIFIERS, {"verify": verify, **options}, "verify", "verifier")


def rule_or_verifier(options: Mapping[str, Any] | str) -> RewardFunction:
    """Return the verifier that `{verify: calculated}` names, else the rule of these options."""
    verified = isinstance(options, Mapping) and "verify" in options
    return make_named(VERIFIERS, options, "verify", "verifier") if verified else rule_from_options(options)
