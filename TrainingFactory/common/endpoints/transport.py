"""HTTP client of model endpoints: keys, connections, time limits, errors. Its subclasses implement the wire formats."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from email.utils import mktime_tz, parsedate_tz
from functools import cache
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, quote_plus, urlsplit

import httpx
from pydantic import validate_call

from TrainingFactory.common.endpoints.messages import ModelReply, ModelRequest
from TrainingFactory.common.options import STRICT, Positive
from TrainingFactory.common.texts import SECRET_VARIABLES, describe, iter_secrets, redact
from TrainingFactory.types import Message, ToolSpec

T = TypeVar("T")
MAX_ERROR_CHARS = 200  # quoted from an endpoint's error response
MAX_BODY_BYTES = 20_000_000
KEEP_ALIVE_SECONDS = (
    2.0  # keep-alive of idle connections: shorter than the server's, which must not close first
)
MIN_SECRET_CHARS = 8  # shorter keys are placeholders such as 0, x or none, for servers that need no key
KEY_BY_HOST = "by host"  # the key in `KEY_VARIABLES` of the URL's host; not a valid variable name
# The variables that may hold the key for a host; the first one that is set counts.
KEY_VARIABLES = {
    "https://api.openai.com": ("OPENAI_API_KEY",),
    "https://api.anthropic.com": ("ANTHROPIC_API_KEY",),
    "https://generativelanguage.googleapis.com": ("GOOGLE_API_KEY", "GEMINI_API_KEY"),
}


class ModelError(Exception):
    """Raised for a failed request. `temporary`: a retry may succeed, after `retry_after` seconds if the endpoint sent
    Retry-After. `denied`: no request with this key, model and address can succeed."""

    def __init__(
        self, text: str, temporary: bool = False, retry_after: float | None = None, denied: bool = False
    ) -> None:
        super().__init__(text)
        self.temporary, self.retry_after, self.denied = temporary, retry_after, denied


class Endpoint(ABC):
    """Client of a model behind HTTP; a subclass per wire format. Every call reads the key from the environment variable
    `api_key_env`, and nothing stores it; by default only the hosts in `KEY_VARIABLES` get a key. `options` are added to
    the request unchanged (temperature, max_tokens, ...); null removes a field. Connections stay open until `close`."""

    PATH: ClassVar[str]  # of a request, after the base URL
    EXPECTED_CONTENT: ClassVar[str]  # what a valid response contains, for errors

    @validate_call(config=STRICT)
    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = KEY_BY_HOST,
        timeout: Positive = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_base_url(base_url)
        url = urlsplit(base_url)
        if api_key_env == KEY_BY_HOST:
            api_key_env = _find_key_variable(f"{url.scheme}://{url.hostname}")
        if api_key_env is not None and not _is_variable_name(api_key_env):
            raise ValueError(
                "api_key_env must be the name of the environment variable that holds the key, such as OPENAI_API_KEY, "
                "not the key itself"
            )
        path = self.PATH.format(model=quote(model, safe=""))
        self.url = base_url.rstrip("/").removesuffix(path) + path
        self.host = url.netloc
        self.model, self.api_key_env, self.timeout = model, api_key_env, timeout
        self.options = dict(options or {})
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the client's event loop
        if api_key_env is not None:
            SECRET_VARIABLES.add(api_key_env)
        for option_key, _ in iter_secrets(self.options):
            name = ".".join(map(str, option_key))
            raise ValueError(f"options.{name} would appear in logs; name the key's variable in api_key_env")

    @abstractmethod
    def make_headers(self, key: str | None) -> dict[str, str]: ...

    @abstractmethod
    def make_body(self, request: ModelRequest) -> dict[str, Any]:
        """Return the request in the endpoint's wire format."""

    @abstractmethod
    def parse_reply(self, response: Any, request: ModelRequest) -> ModelReply:
        """Parse a response. Any LookupError, TypeError or ValueError means that it has another structure."""

    @property
    def identity(self) -> str:
        """Return a text of everything that determines the replies to equal requests: address, model and options. It is
        part of the keys of a cache."""
        return json.dumps([self.url, self.model, self.options], sort_keys=True, default=str)

    async def ask(self, request: ModelRequest) -> ModelReply:
        response_body = await self.post_body(self.make_body(request))
        return self.parse_response(response_body, lambda answer: self.parse_reply(answer, request))

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
        return (await self.ask(ModelRequest(messages, tools))).message

    async def post_body(self, body: dict[str, Any]) -> bytes:
        """Send a request and return the response body. Raise ModelError unless the status is 200."""
        api_key = self._read_key()
        try:
            status, headers, response_body = await self._post(body, api_key)
        except (httpx.TimeoutException, TimeoutError):
            error_text = f"{self.host} did not answer within {self.timeout:g} s"
            raise ModelError(error_text, temporary=True) from None
        except httpx.HTTPError as error:
            error_text = f"{self.host} could not be reached ({type(error).__name__})"
            raise ModelError(error_text, temporary=True) from None
        if status != 200:
            error_text = " ".join(response_body.decode("utf-8", errors="replace").split())
            message = redact(error_text, _list_echoed_forms(api_key))[:MAX_ERROR_CHARS]
            is_temporary = status in (408, 409, 425, 429) or status >= 500
            retry_after = parse_retry_after(headers.get("retry-after"))
            error_text = f"{self.host} answered with status {status}: {message}{self._make_hint(status)}"
            raise ModelError(error_text, is_temporary, retry_after, denied=status in (401, 402, 403, 404))
        return response_body

    def _make_hint(self, status: int) -> str:
        if status in (401, 403):
            key_variable = self.api_key_env or "none; name its variable with api_key_env"
            return f" (key sent: {key_variable})"
        return f" (model {self.model}; check its name and base_url)" if status == 404 else ""

    def parse_response(self, response_body: bytes, parse: Callable[[Any], T]) -> T:
        """Remove the key from a response and parse the response with `parse`. Raise ModelError if it has another
        structure."""
        try:
            api_key = os.environ.get(self.api_key_env) if self.api_key_env else None
            return parse(redact(json.loads(response_body), _list_echoed_forms(api_key)))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            error_text = f"{self.host} did not return {self.EXPECTED_CONTENT} ({describe(error)[:100]})"
            raise ModelError(error_text) from None

    def _read_key(self) -> str | None:
        if self.api_key_env is None:
            return None
        if not (api_key := os.environ.get(self.api_key_env)):
            raise ModelError(
                f"the environment variable {self.api_key_env} (key for {self.host}) is not set", denied=True
            )
        return api_key

    async def _post(self, body: dict[str, Any], key: str | None) -> tuple[int, httpx.Headers, bytes]:
        headers = self.make_headers(key)
        async with (
            asyncio.timeout(self.timeout),  # of the whole request; httpx's timeouts apply between bytes
            # Redirects are not followed, because they would receive the key.
            self._open_client().stream("POST", self.url, json=body, headers=headers) as response,
        ):
            response_body = bytearray()
            async for chunk in response.aiter_bytes():
                response_body += chunk
                if len(response_body) > MAX_BODY_BYTES:
                    raise ModelError(f"{self.host} sent more than {MAX_BODY_BYTES} bytes")
            return response.status_code, response.headers, bytes(response_body)

    def _open_client(self) -> httpx.AsyncClient:
        """Return the client of the running event loop. All requests of a run share one client."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_SECONDS)  # callers limit the concurrency
            self._client = httpx.AsyncClient(verify=_load_certificates(), timeout=self.timeout, limits=limits)
            self._loop = loop
        return self._client

    async def close(self) -> None:
        """Close the connections. A later request reconnects."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()


def check_base_url(base_url: str) -> None:
    """Raise ValueError for an invalid URL, and for one that may contain a key, which logs would show."""
    try:
        url = urlsplit(base_url)
        is_valid = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or True)
    except ValueError:
        raise ValueError("base_url is not a valid URL; write it like https://host/v1") from None
    if any(character in base_url for character in "?#@"):
        raise ValueError(
            "base_url must not contain a password, a query (?) or a fragment (#); put the key into an environment "
            "variable and name that in api_key_env"
        )
    if not is_valid:
        raise ValueError(f"base_url must be a URL such as https://host/v1, not {base_url!r:.100}")


def parse_retry_after(retry_after: str | None) -> float | None:
    """Parse a Retry-After header, which holds seconds or a date. None: missing or invalid."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        date_parts = parsedate_tz(retry_after or "")
        seconds = mktime_tz(date_parts) - time.time() if date_parts else math.nan
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _is_variable_name(name: str) -> bool:
    """Return whether a text is a variable name and does not look like a key: long, with lower case and digits."""
    looks_like_a_key = len(name) >= 20 and re.search(r"\d", name) and re.search(r"[a-z]", name)
    return bool(re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)) and not looks_like_a_key


def _list_echoed_forms(api_key: str | None) -> list[str]:
    """Return the forms in which a server may echo the key: plain, JSON-escaped, URL-encoded."""
    if api_key is None or len(api_key) < MIN_SECRET_CHARS:
        return []
    return [api_key, json.dumps(api_key)[1:-1], quote(api_key), quote_plus(api_key)]


def _find_key_variable(base_address: str) -> str | None:
    """Return the name of the environment variable with the key for an address; None for addresses that get no key."""
    variable_names = KEY_VARIABLES.get(base_address, (None,))
    return next((name for name in variable_names if name and os.environ.get(name)), variable_names[-1])


@cache
def _load_certificates() -> ssl.SSLContext:
    """Load the CA certificates once, because loading takes longer than a request."""
    return httpx.create_ssl_context()
