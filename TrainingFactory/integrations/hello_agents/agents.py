"""What the textbook's programs import beside the RL tools, for machines without HelloAgents: tools, a registry, and an
agent over an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from TrainingFactory.common import event_loop as running
from TrainingFactory.common.endpoint import BY_HOST, Endpoint
from TrainingFactory.tools.builtin.agent import AgentTool
from TrainingFactory.types import ToolResult

OPENAI = "https://api.openai.com/v1"
KEY, ADDRESS, MODEL = "LLM_API_KEY", "LLM_BASE_URL", "LLM_MODEL_ID"
LONG = 30 * 24 * 3600.0  # seconds: a training is a tool call too
SYSTEM = "You are a helpful assistant. Answer in the user's language."


class ToolParameter(BaseModel):
    name: str
    type: str
    description: str
    required: bool = True
    default: Any = None


class Tool(ABC):
    """A tool of HelloAgents 0.2: `run` takes a dictionary and returns text."""

    def __init__(self, name: str, description: str) -> None:
        self.name, self.description = name, description

    @abstractmethod
    def run(self, parameters: dict[str, Any]) -> str: ...

    @abstractmethod
    def get_parameters(self) -> list[ToolParameter]: ...

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the parameters as a JSON schema. With `call` it makes this a tool of ours too, see `as_tool`."""
        listed = self.get_parameters()
        properties = {each.name: {"type": each.type, "description": each.description} for each in listed}
        required = [each.name for each in listed if each.required]
        return {"type": "object", "properties": properties, "required": required}

    def call(self, params: str) -> str:
        return self.run(json.loads(params))


class ToolRegistry:
    """Holds tools by name."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}

    def register_tool(self, tool: Tool) -> None:
        self._tools[tool.name] = tool

    def get_tool(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def execute_tool(self, name: str, input_text: str) -> str:
        if name not in self._tools:
            raise ValueError(f"there is no tool {name!r}; there are: {', '.join(self._tools) or 'none'}")
        return self._tools[name].run({"input": input_text})

    def list_tools(self) -> list[str]:
        return list(self._tools)

    def get_all_tools(self) -> list[Tool]:
        return list(self._tools.values())


@dataclass
class LLMConfig:
    """Names a model behind an OpenAI-compatible endpoint: `base_url`, or LLM_BASE_URL, or OpenAI's. Its key is in
    LLM_API_KEY, for OpenAI's own address in OPENAI_API_KEY; one that is given goes into LLM_API_KEY of this process."""

    model: str | None = None
    api_key: str | None = None
    base_url: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        # A key in the environment belongs to the address that stands beside it there.
        own = self.api_key or self.base_url in (None, os.environ.get(ADDRESS))
        if self.api_key:
            os.environ[KEY], self.api_key = self.api_key, None  # no repr of this object shows it
        self._env = KEY if own and KEY in os.environ else BY_HOST

    def endpoint(self) -> Endpoint:
        model, address = self.model or os.environ.get(MODEL), self.base_url or os.environ.get(ADDRESS)
        if not model:
            raise ValueError(f"no model is named: LLMConfig(model=...), or the environment variable {MODEL}")
        given = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        options = {key: value for key, value in given.items() if value is not None}
        seconds = float(self.timeout or 60)
        return Endpoint(address or OPENAI, model, api_key_env=self._env, timeout=seconds, options=options)


HelloAgentsLLM = LLMConfig  # the textbook's other name for a model


class SimpleAgent:
    """Answers a text with the help of its tools, and remembers what was said."""

    def __init__(
        self, name: str, llm: LLMConfig | None = None, system_prompt: str | None = None, *,
        llm_config: LLMConfig | None = None, tools: Sequence[Tool] = (), tool_registry: ToolRegistry | None = None,
        max_tool_iterations: int = 8,
    ) -> None:  # fmt: skip
        self.name, self.llm = name, llm_config or llm or LLMConfig()
        self.system_prompt, self.max_turns = system_prompt or SYSTEM, max_tool_iterations
        self.tool_registry = tool_registry or ToolRegistry()
        for tool in tools:
            self.add_tool(tool)
        self._history: list[str] = []

    def add_tool(self, tool: Tool) -> None:
        self.tool_registry.register_tool(tool)

    def run(self, input_text: str) -> str:
        """Return the model's last message; raise ValueError where it gave none."""
        tools = self.tool_registry.get_all_tools()
        told = self.system_prompt
        if self._history:
            told += "\n\nThe conversation so far:\n" + "\n".join(self._history)
        limits: dict[str, Any] = {"max_turns": self.max_turns, "timeout": LONG, "tool_timeout": LONG}
        agent = AgentTool(self.name, "", self.llm.endpoint(), tools, system_prompt=told, **limits)

        async def asked() -> ToolResult:
            try:
                return await agent.run({"prompt": input_text})
            finally:
                await agent.close()

        result = running.run(asked)
        if not result.ok:
            raise ValueError(result.content)
        self._history += [f"user: {input_text}", f"assistant: {result.content}"]
        return result.content
