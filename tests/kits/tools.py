"""What the tests of tools share."""

from __future__ import annotations

import asyncio
from typing import Any

from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.types import ToolCall, ToolResult


def execute(tools: Any, *calls: ToolCall, **options: Any) -> list[ToolResult]:
    return asyncio.run(AsyncToolExecutor(tools, **options).batch_execute(calls))


def one(a_tool: Any, arguments: dict[str, Any] | None = None, **options: Any) -> ToolResult:
    return execute([a_tool], ToolCall(a_tool.spec.name, arguments or {}), **options)[0]


def play(tools: Any, *calls: ToolCall, **options: Any) -> list[ToolResult]:
    """One episode with these calls, one after another."""

    async def episode() -> list[ToolResult]:
        executor = AsyncToolExecutor(tools, **options)
        try:
            return [(await executor.batch_execute([call]))[0] for call in calls]
        finally:
            await executor.close()

    return asyncio.run(episode())
