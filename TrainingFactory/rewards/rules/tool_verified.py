"""`reward.type: tool_verified`: verifiers that execute the model's final answer and score the result."""

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

from TrainingFactory.common.arithmetic import calculate, split_tokens
from TrainingFactory.common.options import STRICT, make_named
from TrainingFactory.common.sql.compare import RunQuery
from TrainingFactory.protocols import Episode, RewardFunction
from TrainingFactory.rewards.rules.answers import get_references
from TrainingFactory.rewards.rules.code import CodeTests, ToolRule, make_tool_caller, run_and_read
from TrainingFactory.rewards.rules.json_answers import same_json
from TrainingFactory.rewards.rules.numbers import Number, normalise_symbols
from TrainingFactory.rewards.rules.numeric import NumericRule
from TrainingFactory.rewards.rules.rule_based import make_rule_from_options
from TrainingFactory.rewards.rules.sql import SqlExecution
from TrainingFactory.types import Reward, Task


@dataclass(frozen=True)
class CodeCase:
    args: list[Any]
    expected: Any


CASES_ADAPTER = TypeAdapter(Annotated[list[CodeCase], Field(min_length=1)])


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CodeCases(ToolRule):
    """Reward code whose function `entry` passes the cases in the task's metadata. Only arguments are sent to the tool,
    so that code cannot search for the expected values or return an object that equals everything."""

    rule: ClassVar[str] = "code_cases"
    entry: str = ""
    partial: bool = False

    async def __call__(self, episode: Episode) -> Reward:
        task = episode.task
        entry = task.metadata.get("entry", self.entry)
        if not isinstance(entry, str) or not re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", entry):
            raise ValueError(f"task {task.id}: entry is {entry!r}; it must be the name of a function")
        cases = _read_cases(task)
        code = self.extract_code(episode)
        if not code:
            return self.make_reward(0.0)
        run_code = make_tool_caller(episode, self.tool, "code")
        pass_flags: list[bool] = []
        if not self.partial:  # run the first case alone, so that code that hangs is stopped only once
            first_case, *cases = cases
            pass_flags = [await self._passes(run_code, code, entry, *first_case)]
            if not pass_flags[0]:
                cases = []
        pass_flags += await asyncio.gather(*(self._passes(run_code, code, entry, *case) for case in cases))
        return self.make_reward(sum(pass_flags) / len(pass_flags) if self.partial else all(pass_flags))

    async def _passes(self, run: RunQuery, code: str, entry: str, args: list[Any], expected: Any) -> bool:
        arguments = json.dumps(json.dumps(args))
        expression = f"_json.dumps({entry}(*_json.loads({arguments})))"
        expected_chars = len(json.dumps(expected))
        output = await run_and_read(run, f"{code}\n\nimport json as _json", expression, expected_chars)
        try:
            return output is not None and same_json(json.loads(output), expected)
        except (ValueError, RecursionError):
            return False


def _read_cases(task: Task) -> list[tuple[list[Any], Any]]:
    """Return the arguments and the expected result of each case, with tuples as lists, as in JSON."""
    try:
        cases = CASES_ADAPTER.validate_python(task.metadata.get("cases"))
    except ValidationError as error:
        example = '[{"args": [2], "expected": 4}, ...]'
        raise ValueError(f"task {task.id}: metadata.cases must be a list such as {example}") from error
    return [(case.args, json.loads(json.dumps(case.expected))) for case in cases]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CalculatedRule(NumericRule):
    """Reward the value of the task's metadata `expression`, else the task's answer. With `expressions`, the answer may
    be an expression such as (3+5)*4; if the metadata has `numbers`, it may use only these, each at most once."""

    rule: ClassVar[str] = "calculated"
    expressions: bool = False

    def __call__(self, episode: Episode) -> Reward:
        task = episode.task
        try:
            references = self._make_references(task)
            allowed_numbers = _read_allowed_numbers(task) if self.expressions else None
        except (ValueError, TypeError, ZeroDivisionError, RecursionError) as error:
            raise ValueError(f"task {task.id}: {error}") from error
        answers = self.extract_candidates(episode)
        if allowed_numbers is not None:
            answers = [answer for answer in answers if _uses_only(answer, allowed_numbers)]
        scores = [self.score(answer, reference) for answer in answers for reference in references]
        return self.make_reward(max(scores, default=0.0))

    def _make_references(self, task: Task) -> list[Number]:
        if (expression := task.metadata.get("expression")) is not None:
            return [Number(calculate(str(expression)))]
        return [self.parse_reference(reference) for reference in get_references(task, self.rule)]

    def score(self, answer: str, reference: Number) -> float:
        side_values = _calculate_sides(answer) if self.expressions else {}
        if not side_values:
            return super().score(answer, reference)
        return float(set(side_values.values()) == {reference.value})


def _calculate_sides(answer: str) -> dict[str, Fraction]:
    """Return the value of each side of an equation, or of a single expression; empty for other texts."""
    try:
        return {side: calculate(side) for side in normalise_symbols(answer).strip(" .").split("=")}
    except (ValueError, ZeroDivisionError, RecursionError):
        return {}


def _read_allowed_numbers(task: Task) -> Counter[Fraction] | None:
    """Return the numbers that an expression may use, with their counts; None: any."""
    allowed_numbers = task.metadata.get("numbers")
    return None if allowed_numbers is None else Counter(Fraction(str(number)) for number in allowed_numbers)


def _uses_only(answer: str, allowed_numbers: Counter[Fraction]) -> bool:
    """Return whether a side of the answer is an expression of these numbers, each used at most as often as listed."""
    used_numbers = [
        Counter(map(Fraction, filter(_DIGIT.search, split_tokens(side)))) for side in _calculate_sides(answer)
    ]
    return any(side and side <= allowed_numbers for side in used_numbers)


_DIGIT = re.compile(r"\d")

VERIFIERS: dict[str, Any] = {cls.rule: cls for cls in (SqlExecution, CodeCases, CodeTests, CalculatedRule)}


def make_verifier(verify: str, **options: Any) -> RewardFunction:
    """Return the verifier with this name in VERIFIERS and these options; raise ValueError for an unknown name."""
    return make_named(VERIFIERS, {"verify": verify, **options}, "verify", "verifier")


def make_rule_or_verifier(options: Mapping[str, Any] | str) -> RewardFunction:
    """Return the verifier of options with the key `verify`, such as `{verify: calculated}`; else the rule."""
    if isinstance(options, Mapping) and "verify" in options:
        return make_named(VERIFIERS, options, "verify", "verifier")
    return make_rule_from_options(options)
