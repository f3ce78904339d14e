"""`reward.type: tool_verified`: what the model says at the end is run, and what comes of it decides.

A query by the rows that it gives, code by what it computes, an answer by the calculator. `code_tests` and `sql_result`
among the rules are the short forms.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from TrainingFactory.protocols import Episode, RewardFunction
from TrainingFactory.rewards.answers import references
from TrainingFactory.rewards.checks import check_choice, check_flag, check_number
from TrainingFactory.rewards.numbers import MAX_DIGITS, Number
from TrainingFactory.rewards.rules_base import paid
from TrainingFactory.rewards.rules_text import Numeric
from TrainingFactory.rewards.rules_tools import CodeTests, ToolRule, through, value_after
from TrainingFactory.tools.calculator import calculate
from TrainingFactory.tools.making import call_with
from TrainingFactory.tools.sql import SqlTool
from TrainingFactory.tools.sql_rows import Ask, same_result
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Task


@dataclass(frozen=True, kw_only=True)
class SqlExecution(ToolRule):
    """1 if the model's query gives the rows of the right one (the task's answer).

    Where the task's metadata has `database`, a SQLite file or several, both queries run on a read-only connection to
    each: a query that is right by chance on one file, or that writes the result down as constants, is not right on all.
    Else they go through the environment's `tool`, which must not let the model change the data. Writing, several
    statements, endless and huge queries are wrong.
    """

    rule: ClassVar[str] = "sql_execution"
    tool: str = "sql"
    database: str = "database"  # key in the task's metadata
    timeout: float = 5.0  # seconds for a query on a database
    max_rows: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("timeout", self.timeout, low=0.001)
        check_number("max_rows", self.max_rows, low=1)

    async def __call__(self, episode: Episode) -> Reward:
        task = episode.task
        [right] = references(task, self.rule)[:1]
        query = self.code_of(episode)
        if not query:
            return paid(self.rule, 0.0)
        try:
            if (files := task.metadata.get(self.database)) is None:
                same = await same_result(through(episode, self.tool, "query"), query, str(right))
            else:
                listed = [files] if isinstance(files, str) else list(files)
                results = [await self._same_on(path, query, str(right)) for path in listed]
                same = bool(results) and all(results)
        except ValueError as error:
            raise ValueError(f"task {task.id}: {error}") from error
        return paid(self.rule, float(same))

    async def _same_on(self, path: str, query: str, right: str) -> bool:
        async with _opened(Path(path), self.timeout, int(self.max_rows)) as ask:
            return await same_result(ask, query, right)


@contextlib.asynccontextmanager
async def _opened(path: Path, timeout: float, max_rows: int) -> AsyncIterator[Ask]:
    tool = await in_thread(SqlTool, path, timeout=timeout, max_rows=max_rows, format="json")
    session = tool.session()
    try:
        yield lambda query: session.run({"query": query})
    finally:
        await session.close()


@dataclass(frozen=True, kw_only=True)
class CodeCases(ToolRule):
    """The share of cases for which the model's function gives what is expected (without `partial`: all or nothing).

    Cases are the task's metadata `cases`: `[{"args": [2], "expected": 4}, ...]`; `entry` there (or here) names the
    function. Only arguments are sent to the environment's `tool`; results come back as JSON and are compared here, so
    that code which looks for the expected values, or returns an object that equals everything, gains nothing.
    """

    rule: ClassVar[str] = "code_cases"
    tool: str = "python"
    entry: str = ""
    partial: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("partial", self.partial)

    async def __call__(self, episode: Episode) -> Reward:
        task = episode.task
        entry = task.metadata.get("entry", self.entry)
        if not isinstance(entry, str) or not re.fullmatch(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", entry):
            raise ValueError(
                f"task {task.id}: entry is {entry!r}; it must be the name of the function to call"
            )
        cases = [_case(case, task.id) for case in _all_cases(task.metadata.get("cases"), task.id)]
        code = self.code_of(episode)
        if not code:
            return paid(self.rule, 0.0)
        ask = through(episode, self.tool, "code")
        passed: list[bool] = []
        if not self.partial:  # code that never ends is stopped once, not once for every case
            first, *cases = cases
            passed = [await self._passes(ask, code, entry, *first)]
            cases = cases if passed[0] else []
        passed += await asyncio.gather(*(self._passes(ask, code, entry, *case) for case in cases))
        return paid(self.rule, sum(passed) / len(passed) if self.partial else float(all(passed)))

    async def _passes(self, ask: Ask, code: str, entry: str, args: list[Any], expected: Any) -> bool:
        sent = json.dumps(json.dumps(args))
        shown = f"_json.dumps({entry}(*_json.loads({sent})))"
        said = await value_after(ask, f"{code}\n\nimport json as _json", shown)
        try:
            return said is not None and _equal(json.loads(said), expected)
        except (ValueError, RecursionError, OverflowError):  # a number that is too large to be compared
            return False


def _all_cases(cases: Any, task: str) -> list[Any]:
    if not isinstance(cases, list) or not cases:
        raise ValueError(
            f'task {task} has no list of cases such as [{{"args": [2], "expected": 4}}] in its metadata'
        )
    return cases


def _case(case: Any, task: str) -> tuple[list[Any], Any]:
    if not isinstance(case, Mapping) or not isinstance(case.get("args"), list) or "expected" not in case:
        raise ValueError(f'task {task}: a case is {{"args": [...], "expected": ...}}, not {str(case)[:60]}')
    return case["args"], json.loads(
        json.dumps(case["expected"])
    )  # tuples as the lists that JSON makes of them


def _equal(given: Any, expected: Any) -> bool:
    """The same JSON value; of numbers that are not whole, up to rounding. True is not 1."""
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        whole = isinstance(given, int) and isinstance(expected, int)
        return given == expected or (not whole and math.isclose(given, expected, rel_tol=1e-9))
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(_equal, given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(_equal(given[key], expected[key]) for key in given)
    return type(given) is type(expected) and given == expected


@dataclass(frozen=True, kw_only=True)
class Calculated(Numeric):
    """1 if the answer is the number that the calculator gives for the task's metadata `expression`; a task without one
    has its number as answer. With `expressions` the model may answer with an expression, such as (3+5)*4 for 32; the
    task's metadata `numbers`, if there are any, are then all that may stand in it, each once."""

    rule: ClassVar[str] = "calculated"
    expression: str = "expression"  # key in the task's metadata
    expressions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("expressions", self.expressions)

    def __call__(self, episode: Episode) -> Reward:
        task = episode.task
        try:
            right = self._right(task)
        except (ValueError, ZeroDivisionError, RecursionError) as error:
            raise ValueError(f"task {task.id}: {error}") from error
        text = self.text_of(episode.trajectory)
        answers = self.answers_in(text) if text is not None else []
        numbers = task.metadata.get("numbers") if self.expressions else None
        if numbers is not None:
            answers = [answer for answer in answers if _made_of(answer, numbers)]
        return paid(
            self.rule, max((self.score(answer, one) for answer in answers for one in right), default=0.0)
        )

    def _right(self, task: Task) -> list[Number]:
        if (expression := task.metadata.get(self.expression)) is not None:
            return [Number(calculate(str(expression)))]
        return [self.read_reference(reference) for reference in references(task, self.rule)]

    def score(self, answer: str, reference: Number) -> float:
        values = _calculated(answer) if self.expressions else None
        return super().score(answer, reference) if values is None else float(values == {reference.value})


def _calculated(answer: str) -> set[Fraction] | None:
    """The values of both sides of an answer that is an equation, or of the only one; None for other texts."""
    try:
        return {calculate(side) for side in answer.strip().strip("`$.").split("=")}
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


def _made_of(answer: str, numbers: Any) -> bool:
    """Whether the expression (of an equation its left side) uses no other numbers, and none twice."""
    if not isinstance(numbers, list | tuple):
        raise ValueError(f"the task's metadata numbers is {numbers!r:.60}; it must be a list of numbers")
    texts = re.findall(r"\d+(?:\.\d+)?", answer.partition("=")[0])
    if any(len(text) > MAX_DIGITS for text in texts):
        return False
    used = Counter(Fraction(text) for text in texts)
    return bool(used) and used <= Counter(Fraction(str(number)) for number in numbers)


VERIFIERS: dict[str, Any] = {kind.rule: kind for kind in (SqlExecution, CodeCases, CodeTests, Calculated)}


def make_verifier(verify: str, **options: Any) -> RewardFunction:
    """A reward by its name in VERIFIERS and the options of its class; ValueError for one that is not there."""
    check_choice("verify", verify, VERIFIERS)
    return call_with(VERIFIERS[verify], options, f"verifier {verify}")
