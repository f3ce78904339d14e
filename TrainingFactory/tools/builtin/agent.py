"""`AgentTool`, a sub-agent as a tool: a model with its own tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import validate_call

from TrainingFactory.common.endpoints.names import make_endpoint
from TrainingFactory.common.endpoints.transport import Endpoint, ModelError
from TrainingFactory.common.options import STRICT, Count, Positive, Text, from_mapping
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.builtin.model import (
    PROMPT_SCHEMA,
    SingleToolSession,
    make_failed_result,
    make_messages,
)
from TrainingFactory.tools.executor import DEFAULT_OPTIONS, AsyncToolExecutor
from TrainingFactory.tools.fingerprint import digest, fingerprint_call, fingerprint_object
from TrainingFactory.tools.making import make_tool
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.replies import make_tool_messages
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Message, ToolFailure, ToolResult, ToolSpec


@runtime_checkable
class ChatModel(Protocol):
    """Model that returns the next message of a conversation, or raises ModelError."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message: ...


class AgentTool:
    """A sub-agent as a tool. `model` (an `Endpoint`, the options of one, or any `ChatModel`) works on the caller's
    prompt with its own `tools` (objects or config entries) for at most `max_turns` turns; its last message is the
    result. Every call starts a new conversation, with new sessions of stateful tools."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        name: Text,
        description: str,
        model: Annotated[ChatModel | Mapping[str, Any], from_mapping(make_endpoint, "an agent's model")],
        tools: Sequence[Any] = (),
        *,
        system_prompt: str = "",
        max_turns: Count = 8,
        timeout: Positive = 300.0,
        tool_timeout: Positive = 30.0,
        concurrency: Count | None = None,
        rate: Positive | None = None,
    ) -> None:
        assert not isinstance(model, Mapping), "`from_mapping` has converted options to an Endpoint"
        self.model = model
        self.tools: list[Tool | ToolSource] = [
            make_tool(entry) if isinstance(entry, str | Mapping) else as_tool(entry) for entry in tools
        ]
        self._runtime = ToolRuntime()  # one for all calls, so that they share the limits of the tools
        self._call_numbers = count()
        self.system_prompt, self.max_turns, self.tool_timeout = system_prompt, max_turns, tool_timeout
        self.spec = ToolSpec(name, description, PROMPT_SCHEMA)
        tool_versions = [_fingerprint_tool(tool) for tool in self.tools]
        version = digest(fingerprint_object(model), system_prompt, f"{max_turns}", *tool_versions)
        # Neither pure nor idempotent: a retry would repeat the side effects of the agent's tools.
        self.options = ToolOptions(timeout=timeout, concurrency=concurrency, rate=rate, version=version)

    async def open(self) -> None:
        for tool in self.tools:
            if isinstance(tool, ToolSource):
                await tool.open()

    def session(self) -> SingleToolSession:
        return SingleToolSession(self)

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        executor = AsyncToolExecutor(self.tools, self.tool_timeout)
        executor.attach(self._runtime, next(self._call_numbers))
        try:
            return await self._converse(executor, make_messages(self.system_prompt, arguments["prompt"]))
        except ModelError as error:
            return make_failed_result(self.spec.name, error)
        except ToolFailure as error:  # the agent's tools failed, not those of the episode
            return make_failed_result(self.spec.name, ModelError(str(error), temporary=True))
        finally:
            await executor.close()

    async def close(self) -> None:
        for resource in (self.model, *self.tools):
            if isinstance(resource, Endpoint | ToolSource):
                await resource.close()

    async def _converse(self, executor: AsyncToolExecutor, messages: list[Message]) -> ToolResult:
        specs = [tool.spec for tool in executor.tools]
        for _ in range(self.max_turns):
            message = await self.model.complete(messages, specs)
            if not message.tool_calls:
                return ToolResult(message.content)
            for index, call in enumerate(message.tool_calls):
                call.id = call.id or f"call_{len(messages)}_{index}"  # some endpoints send none
            results = await executor.batch_execute(message.tool_calls)
            if outage := next((result for result in results if result.error == "unavailable"), None):
                raise ModelError(outage.content, temporary=True)  # an outage must not influence the answer
            messages.append(message)
            messages += make_tool_messages(message.tool_calls, results)
        text = f"{self.spec.name} gave no answer within {self.max_turns} turns"
        return ToolResult(text, ok=False, error="exception")


def _fingerprint_tool(tool: Any) -> str:
    """Return the fingerprint of one of the agent's tools or tool sources."""
    if not hasattr(tool, "spec"):  # a source of several tools
        return fingerprint_object(tool)
    return fingerprint_call(tool, getattr(tool, "options", DEFAULT_OPTIONS), {}) or ""
