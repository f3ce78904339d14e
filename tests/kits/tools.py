"""What the tests of tools share."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.tools import AsyncToolExecutor, ToolOptions, ToolRuntime, tool
from TrainingFactory.types import ToolCall, ToolResult, ToolSpec


def execute(tools: Any, *calls: ToolCall, **options: Any) -> list[ToolResult]:
    return asyncio.run(AsyncToolExecutor(tools, **options).batch_execute(calls))


def one(a_tool: Any, arguments: dict[str, Any] | None = None, **options: Any) -> ToolResult:
    return execute([a_tool], ToolCall(a_tool.spec.name, arguments or {}), **options)[0]


def play(
    tools: Any, *calls: ToolCall, cache: Any = None, key: str = "", task: str | None = None, **options: Any
) -> list[ToolResult]:
    """One episode with these calls, one after another."""

    async def episode() -> list[ToolResult]:
        executor = AsyncToolExecutor(tools, **options)
        executor.attach(ToolRuntime(cache=cache), key, task)
        try:
            return [(await executor.batch_execute([call]))[0] for call in calls]
        finally:
            await executor.close()

    return asyncio.run(episode())


def ask(cache: Any, tools: Any, *calls: ToolCall, **options: Any) -> list[ToolResult]:
    return play(tools, *calls, cache=cache, **options)


class Lookup:
    """Counts how often it is really called."""

    def __init__(
        self, name: str = "lookup", parameters: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.spec = ToolSpec(name, "", parameters or {"type": "object", "properties": {}})
        self.options = ToolOptions(**({"pure": True, "retries": 0} | options))
        self.calls: list[dict[str, Any]] = []
        self.answer: Any = None

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        self.calls.append(arguments)
        await asyncio.sleep(0)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer or ToolResult(f"about {json.dumps(arguments)}")


def call(name: str = "lookup", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def no_turn_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any token end a turn: an untrained model hardly ever samples the right one."""
    from TrainingFactory.assembly import sampler
    from TrainingFactory.models import chat_format

    def make_chat(config: Any, loaded: Any, day: Any = None, notify: Any = None) -> Any:
        return chat_format(loaded.tokenizer, stop_ids=range(len(loaded.tokenizer)), vision=loaded.vision)

    monkeypatch.setattr(sampler, "make_chat", make_chat)


class Down(ToolEnvironment):
    @tool
    async def gone(self) -> ToolResult:
        return ToolResult("it is down", ok=False, error="unavailable")
