"""`self.tool_manager` of RL-Factory's methods: the tools of the episode that is being scored, and what it called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from TrainingFactory.rollout.scoring import Episode
from TrainingFactory.tools.options import ToolOptions


@dataclass(slots=True)
class EpisodeTool:
    """One tool, called as qwen_agent's are: `call` with arguments as a dict or as JSON text."""

    manager: EpisodeTools
    name: str
    description: str

    def call(self, params: str | Mapping[str, Any], **_: Any) -> str:
        return self.manager.call_tool(self.name, params)


class EpisodeTools:
    """Calls go through the executor of the episode, with its time limits, cache and recording. `texts` are the turns as
    their methods see them."""

    def __init__(self, episode: Episode, texts: list[str], loop: asyncio.AbstractEventLoop) -> None:
        self._episode, self._loop = episode, loop
        self._turns = dict(zip(texts, episode.trajectory.turns, strict=True))
        self.tool_map: dict[str, EpisodeTool] = {}
        self._full: dict[str, str] = {}  # RL-Factory calls a tool of a server by SERVER-TOOL
        for tool in episode.environment.tools:
            name, options = tool.spec.name, getattr(tool, "options", ToolOptions())
            self.tool_map[name] = EpisodeTool(self, name, tool.spec.description)
            self._full[f"{options.server}-{name}"] = name

    def get_tool(self, name: str) -> EpisodeTool:
        found = self.tool_map.get(self._full.get(name, name))
        if found is None:
            known = ", ".join(self.tool_map) or "none"
            raise ValueError(f"there is no tool {name!r}; the tools are: {known}")
        return found

    def call_tool(self, tool_name: str, tool_args: str | Mapping[str, Any] = "{}", **_: Any) -> str:
        """Return what the tool says; where it could not be asked, the episode is left unscored."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asked = self.acall_tool(tool_name, tool_args)
            return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        raise ValueError("inside async code: await self.tool_manager.acall_tool(name, arguments)")

    async def acall_tool(self, tool_name: str, tool_args: str | Mapping[str, Any] = "{}") -> str:
        given = json.loads(tool_args) if isinstance(tool_args, str) else tool_args
        return (await self._episode.call(self.get_tool(tool_name).name, **given)).content

    _call_tool = call_tool

    def parse_response(self, response_content: str) -> tuple[str, list[dict[str, Any]]]:
        """Return how a turn of this episode was read: ("answer", []), or ("actions", calls), in which a call that could
        not be read is called <error>."""
        turn = self._turns.get(response_content)
        if turn is None:
            raise ValueError("parse_response reads turns of this episode, as get_step_reward gets them")
        calls = [
            {"name": "<error>", "args": call.error}
            if call.error is not None
            else {"name": call.name, "args": json.dumps(call.arguments, ensure_ascii=False)}
            for call in turn.message.tool_calls
        ]
        return ("actions" if calls else "answer"), calls

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"tool_manager has no {name!r} here: the run itself calls tools and writes prompts. There are tool_map, "
            "get_tool, call_tool, acall_tool and parse_response"
        )
