"""`ModelTool`, another model as a tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import validate_call

from TrainingFactory.common.endpoints.names import Api, make_endpoint
from TrainingFactory.common.endpoints.transport import KEY_BY_HOST, ModelError
from TrainingFactory.common.options import STRICT, Count, Positive, Text, ZeroOrMore
from TrainingFactory.protocols import Tool
from TrainingFactory.tools.fingerprint import digest, fingerprint_object
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import Message, ToolResult, ToolSpec

PROMPT_SCHEMA = {
    "type": "object",
    "properties": {"prompt": {"type": "string", "description": "everything it needs to know"}},
    "required": ["prompt"],
}


class ModelTool:
    """Another model as a tool: sends `system_prompt` and the caller's prompt, and returns the model's answer."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        name: Text,
        description: str,
        base_url: str,
        model: str,
        *,
        api: Api = "openai",
        system_prompt: str = "",
        api_key_env: str | None = KEY_BY_HOST,
        timeout: Positive = 60.0,
        options: Mapping[str, Any] | None = None,
        retries: ZeroOrMore = 2,
        concurrency: Count | None = None,
        rate: Positive | None = None,
    ) -> None:
        self.endpoint = make_endpoint(
            model=model, api=api, base_url=base_url, api_key_env=api_key_env, timeout=timeout, options=options
        )
        self.system_prompt = system_prompt
        self.spec = ToolSpec(name, description, PROMPT_SCHEMA)
        self.options = ToolOptions(
            timeout=timeout + 5.0,  # so that the endpoint's own time-out comes first: its error says more
            idempotent=True,  # a repeated request does no harm
            retries=retries,
            concurrency=concurrency,
            rate=rate,
            server=self.endpoint.host,  # tools at one endpoint share a circuit breaker
            version=digest(fingerprint_object(self.endpoint), system_prompt),
        )

    async def open(self) -> None:
        """Do nothing: the first request connects."""

    def session(self) -> SingleToolSession:
        return SingleToolSession(self)

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            answer = await self.endpoint.complete(make_messages(self.system_prompt, arguments["prompt"]), ())
        except ModelError as error:
            return make_failed_result(self.spec.name, error)
        return ToolResult(answer.content)

    async def close(self) -> None:
        await self.endpoint.close()


class SingleToolSession:
    """The session of one tool that has no state."""

    def __init__(self, tool: Tool) -> None:
        self.tools: Sequence[Tool] = [tool]

    async def close(self) -> None:
        """Do nothing: the session holds no resources."""


def make_messages(system_prompt: str, prompt: str) -> list[Message]:
    """Return the first messages: the system prompt unless it is empty, then the user's prompt."""
    system_messages = [Message("system", system_prompt)] if system_prompt else []
    return [*system_messages, Message("user", prompt)]


def make_failed_result(name: str, error: ModelError) -> ToolResult:
    return ToolResult(f"{name}: {error}", ok=False, error="unavailable" if error.temporary else "exception")
