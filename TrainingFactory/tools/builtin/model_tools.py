"""A tool that is another model, and a tool that is an agent: a model with tools of its own."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from itertools import count
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import quote, quote_plus, urlsplit

import httpx

from TrainingFactory.openai_form import message_from_dict, message_to_dict, spec_to_dict
from TrainingFactory.protocols import ChatFormat, Sampler, Tool, ToolSource
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.builtin.making import call_with, make_tool
from TrainingFactory.tools.cache.history import call_name, definition, digest
from TrainingFactory.tools.executor import AsyncToolExecutor
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Message, SamplingParams, ToolFailure, ToolResult, ToolSpec

T = TypeVar("T")
MAX_SAID_CHARS = 200  # of what an endpoint says about an error
MAX_BODY_BYTES = 20_000_000
MIN_SECRET_CHARS = 8  # servers that need no key are given 0, x or none
SECRETS = ("api_key", "apikey", "api-key", "key", "token", "authorization", "password", "secret")
BY_HOST = "by host"  # the key that belongs to the address; no variable has such a name
KEYS = {"https://api.openai.com": "OPENAI_API_KEY", "https://api.anthropic.com": "ANTHROPIC_API_KEY"}


class ModelError(Exception):
    """No answer. `temporary`: the endpoint was busy or out of reach, so that another attempt may help, after
    `wait` seconds if the endpoint has named a time."""

    def __init__(self, text: str, temporary: bool = False, wait: float | None = None) -> None:
        super().__init__(text)
        self.temporary, self.wait = temporary, wait


@runtime_checkable
class ChatModel(Protocol):
    """Answers a conversation with one message; ModelError if it cannot."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message: ...


class Endpoint:
    """A model behind any OpenAI-compatible `/chat/completions`. The key is read from the environment variable
    `api_key_env` at every call and kept nowhere; None: the endpoint needs none. Left out, only the hosts in `KEYS` get
    a key: one must not go to a stranger because it happens to be there. `options` go into the request as
    they are (temperature, max_tokens, ...)."""

    PATH = "/chat/completions"

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = BY_HOST,
        timeout: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_address(base_url)
        address = urlsplit(base_url)
        if api_key_env == BY_HOST:
            api_key_env = KEYS.get(f"{address.scheme}://{address.hostname}")
        if api_key_env is not None and not _is_variable(api_key_env):
            raise ValueError(
                "api_key_env is the name of the environment variable that holds the key, such as OPENAI_API_KEY, not "
                "the key itself"
            )
        if timeout <= 0:
            raise ValueError(f"timeout is in seconds and over 0, not {timeout}")
        self.url = base_url.rstrip("/").removesuffix(self.PATH) + self.PATH
        self.host = address.netloc
        self.model, self.api_key_env, self.timeout = model, api_key_env, timeout
        self.options = dict(options or {})
        if secret := [name for name in self.options if str(name).lower() in SECRETS]:
            raise ValueError(
                f"options.{secret[0]} would stand in every log; api_key_env names what holds the key"
            )

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        body: dict[str, Any] = {"model": self.model, "messages": [_wire(message) for message in messages]}
        if tools:
            body["tools"] = [spec_to_dict(spec) for spec in tools]
        return self.read(await self.exchange(body | self.options), first_message)

    async def exchange(self, body: dict[str, Any]) -> bytes:
        """What the endpoint answers to a request; ModelError if that is no success."""
        key = self._key()
        try:
            status, headers, data = await self._post(body, key)
        except (httpx.TimeoutException, TimeoutError):
            raise ModelError(
                f"{self.host} did not answer within {self.timeout:g} s", temporary=True
            ) from None
        except httpx.HTTPError as error:
            what = type(error).__name__
            raise ModelError(f"{self.host} could not be reached ({what})", temporary=True) from None
        if status != 200:
            said = _without(" ".join(data.decode("utf-8", errors="replace").split()), key)[:MAX_SAID_CHARS]
            temporary = status in (408, 409, 425, 429) or status >= 500
            wait = seconds_of(headers.get("retry-after"))
            raise ModelError(f"{self.host} answered with status {status}: {said}", temporary, wait)
        return data

    def read(self, data: bytes, take: Callable[[Any], T]) -> T:
        """What `take` finds in the answer; ModelError where that is not there."""
        try:
            key = os.environ.get(self.api_key_env) if self.api_key_env else None
            return take(_without(json.loads(data), key))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"[:100]
            raise ModelError(
                f"{self.host} answered with something that is no chat completion ({why})"
            ) from None

    def headers(self, key: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env)):
            raise ModelError(
                f"the environment variable {self.api_key_env}, which holds the key for {self.host}, is not set"
            )
        return key

    async def _post(self, body: dict[str, Any], key: str | None) -> tuple[int, httpx.Headers, bytes]:
        # A client per call: it belongs to the event loop it is used on, and every batch has a loop of its own.
        limit = httpx.Timeout(self.timeout)
        async with (
            asyncio.timeout(self.timeout),  # httpx's limits are between bytes
            httpx.AsyncClient(verify=_certificates(), timeout=limit, headers=self.headers(key)) as client,
            client.stream(
                "POST", self.url, json=body
            ) as response,  # redirects are not followed: they take the key
        ):
            data = bytearray()
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise ModelError(f"{self.host} sent more than {MAX_BODY_BYTES} bytes")
            return response.status_code, response.headers, bytes(data)


def check_address(base_url: Any) -> None:
    """ValueError for what is no address, and for one with a key in it, which every log would show."""
    try:
        parts = urlsplit(base_url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or True)
    except (ValueError, TypeError, AttributeError):
        raise ValueError("base_url is no address; it looks like https://host/v1") from None
    if parts.query or parts.fragment or "@" in base_url:
        raise ValueError(
            "base_url must hold no password and nothing after a ? or #; put the key into an environment variable, "
            "which api_key_env names"
        )
    if not known:
        raise ValueError(f"base_url is an address such as https://host/v1, not {base_url!r:.100}")


def seconds_of(retry_after: str | None) -> float | None:
    """What a Retry-After header asks for: seconds, or a date."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            until = parsedate_to_datetime(retry_after)
        except (ValueError, TypeError, OverflowError):
            return None
        until = until if until.tzinfo else until.replace(tzinfo=UTC)
        seconds = (until - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _is_variable(name: Any) -> bool:
    """Not for what looks like a key: long, in small letters, with digits."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        return False
    return len(name) < 20 or not (re.search(r"\d", name) and re.search(r"[a-z]", name))


def _without(said: Any, key: str | None) -> Any:
    """A server may repeat the key, in an error or in an answer: it goes into no text of ours, also where it stands in
    JSON or in an address. What is shorter is no secret, and stands in any text."""
    if key is None or len(key) < MIN_SECRET_CHARS:
        return said
    if isinstance(said, dict):
        return {name: _without(value, key) for name, value in said.items()}
    if isinstance(said, list):
        return [_without(value, key) for value in said]
    if isinstance(said, str):
        for written in (key, json.dumps(key)[1:-1], quote(key), quote_plus(key)):
            said = said.replace(written, "***")
    return said


def first_message(answer: Any) -> Message:
    return message_from_dict({"role": "assistant"} | answer["choices"][0]["message"])


def _wire(message: Message) -> dict[str, Any]:
    """Without the keys of ours that strict endpoints refuse."""
    row = message_to_dict(message)
    row.pop("reasoning_content", None)
    for call in row.get("tool_calls", ()):
        call.pop("error", None)
    return row


@cache
def _certificates() -> ssl.SSLContext:
    """Loading them takes longer than a call."""
    return httpx.create_ssl_context()


class SampledModel:
    """A sampler of ours as a chat model, for an agent that runs on weights in this process."""

    def __init__(self, sampler: Sampler, chat: ChatFormat, params: SamplingParams) -> None:
        self.sampler, self.chat, self.params = sampler, chat, params

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        prompt = self.chat.render(messages, tools)
        completion = await self.sampler.sample(prompt, self.params)
        return self.chat.parse(completion.token_ids)


class ModelTool:
    """Another model as a tool: the caller's text goes in under `system_prompt`, its answer comes back."""

    def __init__(
        self,
        name: str,
        description: str,
        base_url: str,
        model: str,
        *,
        system_prompt: str = "",
        api_key_env: str | None = BY_HOST,
        timeout: float = 60.0,
        options: Mapping[str, Any] | None = None,
        retries: int = 2,
        concurrency: int | None = None,
        rate: float | None = None,
    ) -> None:
        self.endpoint = Endpoint(base_url, model, api_key_env=api_key_env, timeout=timeout, options=options)
        self.system_prompt = system_prompt
        self.spec = ToolSpec(name, description, _PROMPT)
        version = digest(definition(self.endpoint), system_prompt)
        self.options = ToolOptions(
            timeout=timeout + 5.0,  # the endpoint's own limit comes first and says more
            idempotent=True,  # asking twice does no harm
            retries=retries,
            concurrency=concurrency,
            rate=rate,
            server=self.endpoint.host,  # tools at one endpoint share a circuit breaker
            version=version,
        )

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        try:
            messages = _opening(self.system_prompt, arguments["prompt"])
            answer = await self.endpoint.complete(messages, ())
        except ModelError as error:
            return _failed(self.spec.name, error)
        return ToolResult(answer.content)


class AgentTool:
    """An agent as a tool: `model` (an `Endpoint` or the options of one, or any `ChatModel`) works on the caller's text
    with `tools` of its own (objects, or entries as in a config) for at most `max_turns` turns; its last message is
    the result. Every call is a conversation of its own, with sessions of its own for tools that have state."""

    def __init__(
        self,
        name: str,
        description: str,
        model: ChatModel | Mapping[str, Any],
        tools: Sequence[Any] = (),
        *,
        system_prompt: str = "",
        max_turns: int = 8,
        timeout: float = 300.0,
        tool_timeout: float = 30.0,
        concurrency: int | None = None,
        rate: float | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"tool {name}: max_turns is 1 or more, not {max_turns}")
        self.model: ChatModel = (
            model if isinstance(model, ChatModel) else call_with(Endpoint, model, f"the model of tool {name}")
        )
        self.tools: list[Tool | ToolSource] = [
            make_tool(given) if isinstance(given, str | Mapping) else as_tool(given) for given in tools
        ]
        self._sources = [given for given in self.tools if isinstance(given, ToolSource)]
        self._runtime, self._calls = ToolRuntime(), count()  # limits of its tools are for all its calls
        self.system_prompt, self.max_turns, self.tool_timeout = system_prompt, max_turns, tool_timeout
        self.spec = ToolSpec(name, description, _PROMPT)
        known = [_known_by(given) for given in self.tools]
        version = digest(definition(self.model), system_prompt, f"{max_turns}", *known)
        # Never repeated: what its tools did would be done twice.
        self.options = ToolOptions(timeout=timeout, concurrency=concurrency, rate=rate, version=version)

    def session(self) -> AgentSession:
        return AgentSession(self)

    async def open(self) -> None:
        await asyncio.gather(*(source.open() for source in self._sources))

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources))

    async def answer(self, prompt: str) -> ToolResult:
        executor = AsyncToolExecutor(self.tools, self.tool_timeout)
        executor.attach(self._runtime, next(self._calls))
        try:
            return await self._converse(executor, _opening(self.system_prompt, prompt))
        except ModelError as error:
            return _failed(self.spec.name, error)
        except ToolFailure as error:  # its tools are gone, not those of the episode
            return _failed(self.spec.name, ModelError(str(error), temporary=True))
        finally:
            await executor.close()

    async def _converse(self, executor: AsyncToolExecutor, messages: list[Message]) -> ToolResult:
        specs = [tool.spec for tool in executor.tools]
        for _ in range(self.max_turns):
            message = await self.model.complete(messages, specs)
            if not message.tool_calls:
                return ToolResult(message.content)
            for number, call in enumerate(message.tool_calls):
                call.id = call.id or f"call_{len(messages)}_{number}"  # some endpoints give none
            results = await executor.batch_execute(message.tool_calls)
            if lost := next((result for result in results if result.error == "unavailable"), None):
                raise ModelError(lost.content, temporary=True)  # an outage must not shape the answer
            messages.append(message)
            for call, result in zip(message.tool_calls, results, strict=True):
                messages.append(Message("tool", result.content, tool_call_id=call.id, name=call.name))
        text = f"{self.spec.name} came to no answer within {self.max_turns} turns"
        return ToolResult(text, ok=False, error="exception")


class AgentSession:
    """The agent in one episode. It keeps nothing between calls."""

    def __init__(self, source: AgentTool) -> None:
        self.source = source
        self.spec, self.options = source.spec, source.options

    @property
    def tools(self) -> Sequence[Tool]:
        return [self]

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await self.source.answer(arguments["prompt"])

    async def close(self) -> None:
        """Every call closes what it opened."""


_PROMPT = {
    "type": "object",
    "properties": {"prompt": {"type": "string", "description": "everything it needs to know"}},
    "required": ["prompt"],
}


def _opening(system_prompt: str, prompt: str) -> list[Message]:
    system = [Message("system", system_prompt)] if system_prompt else []
    return [*system, Message("user", prompt)]


def _known_by(given: Tool | ToolSource) -> str:
    """One of an agent's own tools, in the version of the agent."""
    if isinstance(given, ToolSource):
        return definition(given)
    return call_name(given, getattr(given, "options", ToolOptions()), {}) or ""


def _failed(name: str, error: ModelError) -> ToolResult:
    return ToolResult(f"{name}: {error}", ok=False, error="unavailable" if error.temporary else "exception")
