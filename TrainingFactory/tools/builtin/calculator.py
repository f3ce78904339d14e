"""A calculator."""

from __future__ import annotations

from TrainingFactory.common.arithmetic import calculated
from TrainingFactory.tools.decorator import tool


@tool(pure=True)
async def calculator(expression: str) -> str:
    """Calculate + - * / and ( )."""
    # Async although it waits for nothing: arithmetic is too quick to be worth a thread.
    return calculated(expression)
