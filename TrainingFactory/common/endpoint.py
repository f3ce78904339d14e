"""A model behind an OpenAI-compatible endpoint, for tools and judges."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import mktime_tz, parsedate_tz
from functools import cache
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus, urlsplit

import httpx
from pydantic import validate_call

from TrainingFactory.common.openai_format import message_from_dict, message_to_dict, spec_to_dict
from TrainingFactory.common.options import STRICT, Positive
from TrainingFactory.common.texts import SECRET_VARIABLES, describe, secrets_in, without
from TrainingFactory.types import Message, ToolSpec

T = TypeVar("T")
MAX_SAID_CHARS = 200  # of what an endpoint says about an error
MAX_BODY_BYTES = 20_000_000
KEPT_SECONDS = 2.0  # of an idle connection: less than servers keep it, so that none is lost under a request
MIN_SECRET_CHARS = 8  # servers that need no key are given 0, x or none
BY_HOST = "by host"  # the key that belongs to the address; no variable has such a name
KEYS = {"https://api.openai.com": "OPENAI_API_KEY", "https://api.anthropic.com": "ANTHROPIC_API_KEY"}


class ModelError(Exception):
    """No answer. `temporary`: another attempt may help, after `wait` seconds if the endpoint has named a time."""

    def __init__(self, text: str, temporary: bool = False, wait: float | None = None) -> None:
        super().__init__(text)
        self.temporary, self.wait = temporary, wait


class Endpoint:
    """A model behind any OpenAI-compatible `/chat/completions`. The key is read from the environment variable
    `api_key_env` at every call and kept nowhere; left out, only the hosts in `KEYS` get a key. `options` go into the
    request as they are (temperature, max_tokens, ...). Connections are kept until `close`."""

    PATH = "/chat/completions"

    @validate_call(config=STRICT)
    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = BY_HOST,
        timeout: Positive = 60.0,
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
        self.url = base_url.rstrip("/").removesuffix(self.PATH) + self.PATH
        self.host = address.netloc
        self.model, self.api_key_env, self.timeout = model, api_key_env, timeout
        self.options = dict(options or {})
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the client
        if api_key_env is not None:
            SECRET_VARIABLES.add(api_key_env)
        for key, _ in secrets_in(self.options):
            name = ".".join(map(str, key))
            raise ValueError(f"options.{name} would stand in every log; api_key_env names what holds the key")

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        body: dict[str, Any] = {"model": self.model, "messages": [_wire(message) for message in messages]}
        if tools:
            body["tools"] = [spec_to_dict(spec) for spec in tools]
        return self.read(await self.exchange(body | self.options), first_message)

    async def exchange(self, body: dict[str, Any]) -> bytes:
        """Return what the endpoint answers to a request; raise ModelError if that is no success."""
        key = self._key()
        try:
            status, headers, data = await self._post(body, key)
        except (httpx.TimeoutException, TimeoutError):
            text = f"{self.host} did not answer within {self.timeout:g} s"
            raise ModelError(text, temporary=True) from None
        except httpx.HTTPError as error:
            text = f"{self.host} could not be reached ({type(error).__name__})"
            raise ModelError(text, temporary=True) from None
        if status != 200:
            text = " ".join(data.decode("utf-8", errors="replace").split())
            said = without(text, _secrets(key))[:MAX_SAID_CHARS]
            temporary = status in (408, 409, 425, 429) or status >= 500
            wait = seconds_of(headers.get("retry-after"))
            raise ModelError(f"{self.host} answered with status {status}: {said}", temporary, wait)
        return data

    def read(self, data: bytes, take: Callable[[Any], T]) -> T:
        """Return what `take` finds in the answer; raise ModelError where that is not there."""
        try:
            key = os.environ.get(self.api_key_env) if self.api_key_env else None
            return take(without(json.loads(data), _secrets(key)))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            why = describe(error)[:100]
            text = f"{self.host} answered with something that is no chat completion ({why})"
            raise ModelError(text) from None

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
        async with (
            asyncio.timeout(self.timeout),  # httpx's limits are between bytes
            # redirects are not followed: they take the key
            self._open().stream("POST", self.url, json=body, headers=self.headers(key)) as response,
        ):
            data = bytearray()
            async for chunk in response.aiter_bytes():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    raise ModelError(f"{self.host} sent more than {MAX_BODY_BYTES} bytes")
            return response.status_code, response.headers, bytes(data)

    def _open(self) -> httpx.AsyncClient:
        """Return the client of the running loop: one for all requests of a run, another one for another run."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx.Limits(keepalive_expiry=KEPT_SECONDS)  # callers say how many at a time
            self._client = httpx.AsyncClient(verify=_certificates(), timeout=self.timeout, limits=limits)
            self._loop = loop
        return self._client

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()


def check_address(base_url: str) -> None:
    """Raise ValueError for what is no address, and for one with a key in it, which every log would show."""
    try:
        parts = urlsplit(base_url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or True)
    except ValueError:
        raise ValueError("base_url is no address; it looks like https://host/v1") from None
    if any(sign in base_url for sign in "?#@"):
        raise ValueError(
            "base_url must hold no password and nothing after a ? or #; put the key into an environment variable, "
            "which api_key_env names"
        )
    if not known:
        raise ValueError(f"base_url is an address such as https://host/v1, not {base_url!r:.100}")


def seconds_of(retry_after: str | None) -> float | None:
    """Read a Retry-After header: seconds, or a date."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        date = parsedate_tz(retry_after or "")
        seconds = mktime_tz(date) - time.time() if date else math.nan
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _is_variable(name: str) -> bool:
    """Tell names of variables from what looks like a key: long, in small letters, with digits."""
    looks_like_a_key = len(name) >= 20 and re.search(r"\d", name) and re.search(r"[a-z]", name)
    return bool(re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)) and not looks_like_a_key


def _secrets(key: str | None) -> list[str]:
    """Return how a server may repeat the key in an error or an answer: plain, in JSON, in an address."""
    if key is None or len(key) < MIN_SECRET_CHARS:
        return []
    return [key, json.dumps(key)[1:-1], quote(key), quote_plus(key)]


def first_message(answer: Any) -> Message:
    return message_from_dict({"role": "assistant"} | answer["choices"][0]["message"])


def _wire(message: Message) -> dict[str, Any]:
    """Write a message without the keys of ours that strict endpoints refuse."""
    row = message_to_dict(message)
    row.pop("reasoning_content", None)
    for call in row.get("tool_calls", ()):
        call.pop("error", None)
    return row


@cache
def _certificates() -> ssl.SSLContext:
    """Load them once: it takes longer than a call."""
    return httpx.create_ssl_context()
