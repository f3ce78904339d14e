"""The other end of `remote_tools`, on a machine of the cluster: answers calls with the tools that it makes there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.services.build.tools import Handed, tools_of
from TrainingFactory.texts import describe
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.runtime import is_lost, run_tool
from TrainingFactory.types import ToolFailure, ToolResult

FRESH = "[a fresh process: the last one died; what this episode had there is gone]\n"


def start(entries: list[dict[str, Any]]) -> Callable[[dict[str, Any]], Coroutine[Any, Any, Any]]:
    """Make the tools on the other machine, with its own environment variables; return what answers."""
    made = [
        tool
        for number, entry in enumerate(entries)
        for tool in tools_of(ToolEntry(**entry), f"tools.{number}")
    ]
    return _Hosted(made).answer


class _Hosted:
    """Runs there: the tools, and what each episode has of them."""

    def __init__(self, tools: Sequence[Handed]) -> None:
        self._tools = tools
        self._episodes: dict[str, AsyncToolExecutor] = {}

    async def answer(self, message: dict[str, Any]) -> dict[str, Any] | str | None:
        """Return the result of a call, or why its tools are gone; without a call, end the episode."""
        name = message["episode"]
        if "tool" not in message:
            if (ended := self._episodes.pop(name, None)) is not None:
                await ended.close()
            return None
        fresh = name not in self._episodes
        if fresh:
            self._episodes[name] = AsyncToolExecutor(self._tools)
        executor = self._episodes[name]
        tool = next(each for each in executor.tools if each.spec.name == message["tool"])
        try:
            result = await run_tool(tool, message["arguments"])
        except ToolFailure as error:
            return str(error)
        except Exception as error:  # foreign code
            text, kind = (
                f"{tool.spec.name} failed: {describe(error)}",
                "unavailable" if is_lost(error) else "exception",
            )
            result = ToolResult(text, ok=False, error=kind)
        if fresh and message["begun"]:
            result.content = FRESH + result.content
        return dataclasses.asdict(result)
