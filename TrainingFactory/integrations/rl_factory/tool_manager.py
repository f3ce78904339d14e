"""RL-Factory's `self.tool_manager`: the tools of one episode and the calls of its turns."""

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


def format_tagged_text(message: Message) -> str:
    """Return a turn as text for RL-Factory's `step`, with its calls in <tool_call> tags."""
    thought = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    tagged_calls = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return thought + "\n".join(filter(None, [message.content, *tagged_calls]))


@dataclass(slots=True)
class EpisodeTool:
    """Tool with the interface of qwen_agent, whose `call` takes arguments as a dict or as JSON text."""

    manager: EpisodeTools
    name: str
    description: str

    def call(self, params: str | Mapping[str, Any], **_: Any) -> str:
        return self.manager.call_tool(self.name, params)


class EpisodeTools:
    """Runs tool calls with the executor of the episode, its timeouts, cache and recording. `message_by_text` maps the
    texts that a user's methods receive to their messages; `results` collects the results of `execute_actions`."""

    def __init__(self, environment: ToolEnvironment, message_by_text: Mapping[str, Message]) -> None:
        self._executor, self._loop = environment.executor, asyncio.get_running_loop()
        self._message_by_text = message_by_text
        self.results: list[ToolResult] = []
        self.tool_map: dict[str, EpisodeTool] = {}
        self._name_by_server_name: dict[str, str] = {}  # RL-Factory names a tool of a server SERVER-TOOL
        for tool in environment.tools:
            tool_name, options = tool.spec.name, getattr(tool, "options", ToolOptions())
            self.tool_map[tool_name] = EpisodeTool(self, tool_name, tool.spec.description)
            self._name_by_server_name[f"{options.server}-{tool_name}"] = tool_name

    def get_tool(self, name: str) -> EpisodeTool:
        tool = self.tool_map.get(self._name_by_server_name.get(name, name))
        if tool is None:
            raise ValueError(f"there is no tool {name!r}. Available: {', '.join(self.tool_map) or 'none'}")
        return tool

    def call_tool(self, tool_name: str, tool_args: str | Mapping[str, Any] = "{}", **_: Any) -> str:
        """Call a tool and return its result. If the tool is unavailable, the episode stays unscored."""
        return self._run_blocking(self.acall_tool(tool_name, tool_args))

    async def acall_tool(self, tool_name: str, tool_args: str | Mapping[str, Any] = "{}") -> str:
        arguments = json.loads(tool_args) if isinstance(tool_args, str) else tool_args
        return (await call_tool(self._executor, self.get_tool(tool_name).name, arguments)).content

    _call_tool = call_tool

    def _run_blocking(self, coroutine: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        coroutine.close()
        raise ValueError(
            "call_tool blocks. In async code: await self.tool_manager.acall_tool(name, arguments)"
        )

    def parse_response(self, response_content: str) -> tuple[str, list[dict[str, Any]]]:
        """Parse a turn of this episode, or any text with <tool_call> tags. Return ("answer", []) or ("actions", calls);
        a call that cannot be parsed has the name <error>."""
        calls = [
            {"name": "<error>", "args": call.error}
            if call.error is not None
            else {"name": call.name, "args": json.dumps(call.arguments, ensure_ascii=False)}
            for call in self._find_calls(response_content)
        ]
        return ("actions" if calls else "answer"), calls

    def _find_calls(self, text: str) -> list[ToolCall]:
        turn = self._message_by_text.get(text)
        return read_tagged(text.rpartition("</think>")[2])[1] if turn is None else turn.tool_calls

    def execute_actions(self, responses: Sequence[str]) -> tuple[list[str], list[Any]]:
        """Run the tool calls in each text. For a text without calls return "answer" and the text itself, for a text
        with calls "actions" and the tool messages."""
        actions, observations = [], []
        for text in responses:
            calls = self._find_calls(text)
            results = self._run_blocking(self._executor.batch_execute(calls)) if calls else []
            self.results += results
            actions.append("actions" if calls else "answer")
            observations.append([{"role": "tool", "content": result.content} for result in results] or text)
        return actions, observations

    def get_prompt(
        self, input_data: Any, tokenizer: Any = None, mode: str = "tool_call", **_: Any
    ) -> PromptText:
        """Return the messages as PromptText; the run applies the model's own chat template to them."""
        messages = [{"role": "tool", "content": input_data}] if isinstance(input_data, str) else input_data
        return MessageTokenizer().apply_chat_template(messages)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"tool_manager has no {name!r}, because the run itself builds the prompts. Available: tool_map, get_tool, "
            "call_tool, acall_tool, parse_response, execute_actions and get_prompt"
        )
