"""Substitutes for HelloAgents' other classes, for machines without the package: tools, a tool registry, and an agent on
an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from TrainingFactory.common import event_loop
from TrainingFactory.common.endpoints.openai import ChatEndpoint
from TrainingFactory.common.endpoints.transport import KEY_BY_HOST
from TrainingFactory.tools.builtin.agent import AgentTool
from TrainingFactory.types import ToolResult

OPENAI_URL = "https://api.openai.com/v1"
KEY_VARIABLE, URL_VARIABLE, MODEL_VARIABLE = "LLM_API_KEY", "LLM_BASE_URL", "LLM_MODEL_ID"
MAX_WAIT = 30 * 24 * 3600.0  # seconds; long, because a whole training can be one tool call
SYSTEM_PROMPT = "You are a helpful assistant. Answer in the user's language."


class ToolParameter(BaseModel):
    name: str
    type: str
    description: str
    required: bool = True
    default: Any = None


class Tool(ABC):
    """Tool of HelloAgents 0.2, whose `run` takes a dictionary and returns text."""

    def __init__(self, name: str, description: str) -> None:
        self.name, self.description = name, description

    @abstractmethod
    def run(self, parameters: dict[str, Any]) -> str: ...

    @abstractmethod
    def get_parameters(self) -> list[ToolParameter]: ...

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the parameters, from which `as_tool` builds one of our tools."""
        parameters = self.get_parameters()
        properties = {p.name: {"type": p.type, "description": p.description} for p in parameters}
        required = [parameter.name for parameter in parameters if parameter.required]
        return {"type": "object", "properties": properties, "required": required}

    def call(self, params: str) -> str:
        return self.run(json.loads(params))


class ToolRegistry:
    """HelloAgents' registry of tools by name."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}

    def register_tool(self, tool: Tool) -> None:
        self._tools[tool.name] = tool

    def get_tool(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def execute_tool(self, name: str, input_text: str) -> str:
        if name not in self._tools:
            raise ValueError(f"there is no tool {name!r}. Available: {', '.join(self._tools) or 'none'}")
        return self._tools[name].run({"input": input_text})

    def list_tools(self) -> list[str]:
        return list(self._tools)

    def get_all_tools(self) -> list[Tool]:
        return list(self._tools.values())


@dataclass
class LLMConfig:
    """A model behind an OpenAI-compatible endpoint: `base_url`, or LLM_BASE_URL, or OpenAI's. Its key is in
    LLM_API_KEY, or in OPENAI_API_KEY for OpenAI's own address; `api_key` is moved to LLM_API_KEY of this process."""

    model: str | None = None
    api_key: str | None = None
    base_url: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        # LLM_API_KEY is sent only to the address in LLM_BASE_URL, or together with an explicit `api_key`.
        uses_key = self.api_key or self.base_url in (None, os.environ.get(URL_VARIABLE))
        if self.api_key:
            os.environ[KEY_VARIABLE] = self.api_key
            self.api_key = None  # keeps the key out of repr()
        self._key_env = KEY_VARIABLE if uses_key and KEY_VARIABLE in os.environ else KEY_BY_HOST

    def make_endpoint(self) -> ChatEndpoint:
        model = self.model or os.environ.get(MODEL_VARIABLE)
        base_url = self.base_url or os.environ.get(URL_VARIABLE)
        if not model:
            raise ValueError(f"no model is named. Pass LLMConfig(model=...) or set {MODEL_VARIABLE}.")
        fields = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        options = {key: value for key, value in fields.items() if value is not None}
        timeout = float(self.timeout or 60)
        return ChatEndpoint(
            base_url or OPENAI_URL, model, api_key_env=self._key_env, timeout=timeout, options=options
        )


HelloAgentsLLM = LLMConfig  # the textbook's other name for a model


class SimpleAgent:
    """Agent that answers texts with its tools and remembers the conversation."""

    def __init__(
        self, name: str, llm: LLMConfig | None = None, system_prompt: str | None = None, *,
        llm_config: LLMConfig | None = None, tools: Sequence[Tool] = (), tool_registry: ToolRegistry | None = None,
        max_tool_iterations: int = 8,
    ) -> None:  # fmt: skip
        self.name = name
        self.llm = llm_config or llm or LLMConfig()
        self.system_prompt = system_prompt or SYSTEM_PROMPT
        self.max_turns = max_tool_iterations
        self.tool_registry = tool_registry or ToolRegistry()
        for tool in tools:
            self.add_tool(tool)
        self._history: list[str] = []

    def add_tool(self, tool: Tool) -> None:
        self.tool_registry.register_tool(tool)

    def run(self, input_text: str) -> str:
        """Return the model's final message; raise ValueError if it gave none."""
        tools = self.tool_registry.get_all_tools()
        prompt = self.system_prompt
        if self._history:
            prompt += "\n\nThe conversation so far:\n" + "\n".join(self._history)
        limits: dict[str, Any] = {"max_turns": self.max_turns, "timeout": MAX_WAIT, "tool_timeout": MAX_WAIT}
        agent = AgentTool(self.name, "", self.llm.make_endpoint(), tools, system_prompt=prompt, **limits)

        async def run_agent() -> ToolResult:
            try:
                return await agent.run({"prompt": input_text})
            finally:
                await agent.close()

        result = event_loop.run(run_agent)
        if not result.ok:
            raise ValueError(result.content)
        self._history += [f"user: {input_text}", f"assistant: {result.content}"]
        return result.content
