"""A calculator."""

from __future__ import annotations

from TrainingFactory.arithmetic import calculated
from TrainingFactory.tools.decorator import FunctionTool, tool


@tool(pure=True)
async def calculator(expression: str) -> str:
    """Calculate + - * / and ( )."""
    # Async although it waits for nothing: arithmetic is too quick to be worth a thread.
    return calculated(expression)


def make_calculator() -> FunctionTool:
    """Return the calculator: in the catalog every tool is made by a call."""
    return calculator
