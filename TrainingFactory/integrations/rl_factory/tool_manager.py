"""`self.tool_manager` of RL-Factory's methods: the tools of one episode, and what its turns call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.integrations.rl_factory.data import MessageTokenizer, PromptText
from TrainingFactory.models.parsers import read_tagged
from TrainingFactory.rollout.scoring import call_tool
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import Message, ToolCall, ToolResult


def response_text(message: Message) -> str:
    """Write a turn as RL-Factory's `step` gets it: calls are in <tool_call> tags, whatever the model's own form is."""
    thought = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    tagged = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return thought + "\n".join(filter(None, [message.content, *tagged]))


@dataclass(slots=True)
class EpisodeTool:
    """One tool, called as qwen_agent's are: `call` with arguments as a dict or as JSON text."""

    manager: EpisodeTools
    name: str
    description: str

    def call(self, params: str | Mapping[str, Any], **_: Any) -> str:
        return self.manager.call_tool(self.name, params)


class EpisodeTools:
    """Sends calls through the executor of the episode, with its time limits, cache and recording. `turns` has the
    messages by the texts that the methods get; `results` are those of `execute_actions`."""

    def __init__(self, environment: ToolEnvironment, turns: Mapping[str, Message]) -> None:
        self._executor, self._loop = environment.executor, asyncio.get_running_loop()
        self._turns, self.results = turns, list[ToolResult]()
        self.tool_map: dict[str, EpisodeTool] = {}
        self._full: dict[str, str] = {}  # RL-Factory calls a tool of a server by SERVER-TOOL
        for tool in environment.tools:
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
        return self._waited(self.acall_tool(tool_name, tool_args))

    async def acall_tool(self, tool_name: str, tool_args: str | Mapping[str, Any] = "{}") -> str:
        given = json.loads(tool_args) if isinstance(tool_args, str) else tool_args
        return (await call_tool(self._executor, self.get_tool(tool_name).name, given)).content

    _call_tool = call_tool

    def _waited(self, coroutine: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        coroutine.close()
        raise ValueError("inside async code: await self.tool_manager.acall_tool(name, arguments)")

    def parse_response(self, response_content: str) -> tuple[str, list[dict[str, Any]]]:
        """Return how a turn of this episode, or another text with <tool_call> tags, is read: ("answer", []), or
        ("actions", calls), in which a call that could not be read is called <error>."""
        calls = [
            {"name": "<error>", "args": call.error}
            if call.error is not None
            else {"name": call.name, "args": json.dumps(call.arguments, ensure_ascii=False)}
            for call in self._calls(response_content)
        ]
        return ("actions" if calls else "answer"), calls

    def _calls(self, text: str) -> list[ToolCall]:
        turn = self._turns.get(text)
        return read_tagged(text.rpartition("</think>")[2])[1] if turn is None else turn.tool_calls

    def execute_actions(self, responses: Sequence[str]) -> tuple[list[str], list[Any]]:
        """Call what the texts call; return for each "answer" and its text, or "actions" and its tools' messages."""
        actions, results = [], []
        for text in responses:
            calls = self._calls(text)
            found = self._waited(self._executor.batch_execute(calls)) if calls else []
            self.results += found
            actions.append("actions" if calls else "answer")
            results.append([{"role": "tool", "content": result.content} for result in found] or text)
        return actions, results

    def get_prompt(
        self, input_data: Any, tokenizer: Any = None, mode: str = "tool_call", **_: Any
    ) -> PromptText:
        """Return the text of messages, which the run writes by the model's own chat template."""
        messages = [{"role": "tool", "content": input_data}] if isinstance(input_data, str) else input_data
        return MessageTokenizer().apply_chat_template(messages)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"tool_manager has no {name!r} here: the run itself writes prompts. There are tool_map, get_tool, "
            "call_tool, acall_tool, parse_response, execute_actions and get_prompt"
        )
