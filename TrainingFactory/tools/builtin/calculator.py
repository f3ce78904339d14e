"""The `calculator` tool."""

from __future__ import annotations

from TrainingFactory.common.arithmetic import format_result
from TrainingFactory.tools.decorator import tool


@tool(pure=True)
async def calculator(expression: str) -> str:
    """Calculate + - * / and ( )."""
    # Async without await: a thread would cost more than the arithmetic.
    return format_result(expression)
