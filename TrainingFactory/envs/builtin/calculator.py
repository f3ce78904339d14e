"""Arithmetic with a calculator tool, too hard for a small model without it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

from TrainingFactory.common.arithmetic import calculate, format_result
from TrainingFactory.envs.base import ToolEnvironment
from TrainingFactory.envs.builtin.splits import generate_tasks
from TrainingFactory.tools import tool
from TrainingFactory.types import Message, Task, ToolCall


class CalculatorEnvironment(ToolEnvironment):
    """Arithmetic with one tool, `calculator`; the answer is a number."""

    system_prompt = "Calculate, then answer with the number."

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        return islice(
            generate_tasks("calculator", split, seed, _make_task, lambda task: task.metadata["expression"]),
            count,
        )

    @tool(pure=True)
    @staticmethod
    async def calculator(expression: str) -> str:
        """Calculate + - * / and ( )."""
        return format_result(expression)

    def expert(self) -> Iterator[Message]:
        """Yield the turns of the reference solution."""
        yield _call_calculator(self.task.metadata["expression"])
        yield Message("assistant", str(self.task.answer))

    def novice(self, rng: random.Random) -> Iterator[Message]:
        """Yield turns with a typical mistake, so that a warm start on them leaves room for RL to improve."""
        expression = self.task.metadata["expression"]
        mistake = rng.choice(("guesses", "wrong sum", "ignores the reply"))
        if mistake == "wrong sum":
            wrong_expression = expression.replace(expression[2], rng.choice("+-*".replace(expression[2], "")))
            yield _call_calculator(wrong_expression)
            yield Message("assistant", str(calculate(wrong_expression)))
            return
        if mistake == "ignores the reply":
            yield _call_calculator(expression)
        yield Message("assistant", str(rng.randint(10, 999)))


def _make_task(task_id: str, rng: random.Random) -> Task:
    # Two digits, because a model of half a million parameters does not copy three digits reliably.
    expression = f"{rng.randint(10, 99)}{rng.choice('+-*')}{rng.randint(10, 99)}"
    answer = str(calculate(expression))
    return Task(task_id, f"{expression}=?", answer, {"expression": expression})


def _call_calculator(expression: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall("calculator", {"expression": expression})])
