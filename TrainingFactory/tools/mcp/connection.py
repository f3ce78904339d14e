"""One connection to one MCP server, and the only file that imports the SDK (which takes a second: import this
module where a connection is opened, not before).

A connection is owned by one task, which enters the SDK's client and waits in it for the end. Whatever goes wrong
(a dead process, a refused request, a cancellation out of nowhere, a group of exceptions) becomes `ServerDown`.
Everything here runs on the background loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2
from jsonschema.protocols import Validator
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolRequest, CallToolRequestParams
from pydantic import TypeAdapter, ValidationError

from TrainingFactory.tools.mcp.config import ServerConfig
from TrainingFactory.tools.mcp.content import tool_result
from TrainingFactory.tools.mcp.noise import Ring, filter_logs, keep_quiet, stderr_into
from TrainingFactory.tools.schema import check_schema, validator_of
from TrainingFactory.types import ToolResult, ToolSpec

CLOSE_SECONDS = 8.0  # the SDK's own patience with a server that ignores its end, and a little more
CHECK_SECONDS = 30.0  # for a sign of life, or a call's time-out if that is longer: it may be busy with one
MAX_PAGES = 100
# How the SDK words, as if they were the server's answers, what happened to the connection.
CLOSED = "Connection closed"
SESSION_GONE = "Session terminated"  # an HTTP server that was restarted
CUT_OFF = "SSE stream ended without a response"  # this call's stream alone
HTTP_ERROR = "Server returned an error response"
LONG = 24 * 3600.0  # an idle stream is no error; calls have time-outs of their own


_AS_IT_CAME: TypeAdapter[Any] = TypeAdapter(dict[str, Any])


class ServerDown(Exception):
    """The connection is gone, or could not be made. `sent`: the server may have seen the call."""

    def __init__(self, reason: str, sent: bool = True) -> None:
        super().__init__(reason)
        self.sent = sent


@dataclass(slots=True)
class OfferedTool:
    """A tool as its server describes it."""

    name: str
    description: str
    parameters: dict[str, Any]
    output: dict[str, Any] | None = None  # the schema of structured answers
    idempotent: bool = False  # by the server's own hints
    version: str = ""


class Connection:
    """`on_tools` is told of the list of tools whenever the server says that it changed."""

    def __init__(self, config: ServerConfig, on_tools: Callable[[list[OfferedTool]], None]) -> None:
        self.config = config
        self.tools: list[OfferedTool] = []
        self.lost = asyncio.Event()
        self.busy = 0  # calls in flight
        self.served = False  # a call was answered
        self._on_tools = on_tools
        self._outputs: dict[str, Validator] = {}  # what structured answers must be like, by tool
        self._client: Client | None = None
        self._ring = Ring()
        self._over = asyncio.Event()
        self._reason = ""
        self._has_session = False
        self._messages = 0  # that came in
        self._checking: asyncio.Task[None] | None = None
        self._scope = anyio.CancelScope()
        self._owner: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._dropped: set[asyncio.Task[Any]] = set()
        self._relisting: asyncio.Task[None] | None = None
        pattern = config.settings.error_text
        self._error_text = re.compile(pattern) if pattern is not None else None
        self._secrets = config.secrets

    async def open(self) -> None:
        """Connects, and lists the tools. Raises ServerDown; then nothing is left running."""
        ready = asyncio.get_running_loop().create_future()
        filter_logs()
        context = contextvars.copy_context()
        context.run(keep_quiet)
        self._owner = asyncio.get_running_loop().create_task(self._own(ready), context=context)
        try:
            await asyncio.shield(ready)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def _own(self, ready: asyncio.Future[None]) -> None:
        problem: BaseException | None = None
        limit = self.config.settings.connect_timeout
        try:
            with self._scope:
                self._scope.deadline = anyio.current_time() + limit
                async with contextlib.AsyncExitStack() as stack:
                    await self._enter(stack)
                    self._scope.deadline = float("inf")
                    ready.set_result(None)
                    await self._over.wait()
        except BaseException as error:  # also CancelledError and groups, which the SDK raises when HTTP fails
            problem = error
        finally:
            self._client = None
            for task in (self._relisting, self._checking):
                if task is not None:
                    task.cancel()
        if not self._reason:
            timed_out = not ready.done() and problem is None
            self._reason = f"it did not answer within {limit:g} s" if timed_out else _cause(problem)
        self.lost.set()
        for task in self._calls:  # nobody else will wake them
            self._dropped.add(task)
            task.cancel()
        if not ready.done():
            ready.set_exception(self._down("could not be connected", sent=False))
            ready.exception()  # looked at, in case that nobody waits any more

    async def _enter(self, stack: contextlib.AsyncExitStack) -> None:
        transport = await self._transport(stack)
        # A session of its own needs the handshake of older protocols: the newest one has no sessions over HTTP.
        own_session = self.config.settings.isolation != "shared" and self.config.transport != "stdio"
        client = Client(
            _Watched(transport, self._ended, self._heard),
            mode="legacy" if own_session else "auto",
            cache=None,
            message_handler=self._notified,
        )
        await stack.enter_async_context(client)
        if own_session and self.config.transport == "http" and not self._has_session:
            raise ServerDown("it gives out no sessions, which isolation session needs")
        self._learn(await _list_tools(client))
        self._client = client
        changes = client.server_capabilities.tools
        if changes is not None and changes.list_changed and client.protocol_version >= "2026":
            self._relisting = asyncio.create_task(self._listen(client))

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        config = self.config
        if config.transport == "sse":
            return sse_client(config.url, config.headers, timeout=30.0, sse_read_timeout=LONG)
        if config.transport == "http":
            timeout = httpx2.Timeout(30.0, read=LONG, pool=LONG)
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            hooks = {"response": [self._saw_response]}
            http = httpx2.AsyncClient(
                headers=config.headers, timeout=timeout, limits=limits, event_hooks=hooks
            )
            return streamable_http_client(config.url, http_client=await stack.enter_async_context(http))
        parameters = StdioServerParameters(
            command=config.command,
            args=list(config.args),
            env=config.env,
            cwd=config.cwd,
            encoding_error_handler="replace",
        )
        return stdio_client(parameters, errlog=stack.enter_context(stderr_into(self._ring)))

    def _heard(self, item: Any) -> None:
        self._messages += 1
        if isinstance(item, Exception):
            self._ring.heard(item)

    async def _saw_response(self, response: httpx2.Response) -> None:
        self._has_session = self._has_session or "mcp-session-id" in response.headers

    def _ended(self) -> None:
        """The server's side of the transport is at its end."""
        if not self._over.is_set():
            if self._client is not None:
                self._reason = "it closed the connection"
            self._over.set()
            self.lost.set()

    async def _notified(self, message: Any) -> None:
        if (
            getattr(message, "method", None) == "notifications/tools/list_changed"
            and self._client is not None
        ):
            if self._relisting is not None:
                self._relisting.cancel()
            self._relisting = asyncio.create_task(self._relist(self._client))

    async def _listen(self, client: Client) -> None:
        """The newest protocol sends changes only to those who subscribe."""
        with contextlib.suppress(Exception):  # then changes are seen at the next connection
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    await self._relist(client)

    async def _relist(self, client: Client) -> None:
        with contextlib.suppress(Exception):  # a connection that dies meanwhile is noticed elsewhere
            self._learn(await _list_tools(client))
            self._on_tools(self.tools)

    def _learn(self, tools: list[OfferedTool]) -> None:
        self.tools = tools
        self._outputs = {}
        for tool in tools:
            with contextlib.suppress(ValueError):  # a promise that cannot be read holds for nothing
                if tool.output is not None:
                    check_schema(ToolSpec(tool.name, parameters=tool.output))
                    self._outputs[tool.name] = validator_of(tool.output)

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """The server's answer. Raises ServerDown. Cancelling the call cancels it on the server."""
        client, task = self._client, asyncio.current_task()
        assert task is not None
        if client is None or self.lost.is_set():
            raise self._down("is not available", sent=False)
        self.busy += 1
        self._calls.add(task)
        before = self._messages
        keep_quiet()
        try:
            request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
            # Not `call_tool`, which builds a model of the answer that we would take apart again.
            answer = await client.session.send_request(request, _AS_IT_CAME)
        except asyncio.CancelledError:
            if task not in self._dropped:  # the caller's own wish, mostly because it took too long
                if self._messages == before and self._checking is None:
                    self._checking = asyncio.create_task(self._check(client))
                raise
            task.uncancel()
            raise self._down("was lost during the call") from None
        except MCPError as error:
            return self._refused(name, error)
        except (OSError, httpx2.HTTPError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            self._lose(_cause(error))
            raise self._down("was lost during the call") from None
        except (RuntimeError, ValidationError) as error:  # an answer that breaks the protocol
            return self._invalid(name, str(error) or type(error).__name__)
        finally:
            self.busy -= 1
            self._calls.discard(task)
            self._dropped.discard(task)
        self.served = True
        if answer.get("resultType") == "input_required":
            return self._invalid(name, "it asks for input, and nobody is there to give it")
        promised = None if answer.get("isError") else self._outputs.get(name)
        if promised is not None and not promised.is_valid(answer.get("structuredContent")):
            return self._invalid(name, "it does not fit the server's own output schema")
        return tool_result(answer, self._error_text, self._secrets)

    def _invalid(self, name: str, problem: str) -> ToolResult:
        text = self.config.hide(problem.splitlines()[0][:300])
        return ToolResult(f"{name} gave an invalid answer: {text}", ok=False, error="exception")

    async def _check(self, client: Client) -> None:
        """Whether a server that was silent for the whole of a call is still there; a hung one is given up."""
        before = self._messages
        limit = max(CHECK_SECONDS, self.config.settings.timeout or 0.0)
        with contextlib.suppress(Exception), anyio.move_on_after(limit):
            await client.list_tools()
        self._checking = None
        if self._messages == before:
            self._lose("it stopped answering")

    def _refused(self, name: str, error: MCPError) -> ToolResult:
        """An error in place of an answer; the end of the connection comes as one too."""
        if error.message in (CLOSED, SESSION_GONE, CUT_OFF):
            if error.message != CUT_OFF:
                self._lose(_cause(error))
            raise self._down("was lost during the call", sent=error.message != SESSION_GONE)
        self.served = True
        text = self.config.hide(error.message)
        kind = "unavailable" if error.message == HTTP_ERROR else "exception"
        return ToolResult(f"{name} failed: {text}", ok=False, error=kind)

    def _lose(self, reason: str) -> None:
        self._reason = self._reason or reason
        self.lost.set()
        self._over.set()

    def _down(self, what: str, sent: bool = True) -> ServerDown:
        reason = f": {self._reason}" if self._reason else ""
        text = f"server {self.config.name!r} ({self.config.target}) {what}{reason}{self._ring.story()}"
        return ServerDown(self.config.hide(text), sent)

    def farewell(self) -> str:
        """Why it was lost, for the log."""
        return str(self._down("was lost"))

    async def close(self) -> None:
        """Ends the connection, and the process where it is ours. Comes back when both are gone."""
        self._reason = self._reason or "it was closed"
        self._over.set()
        self.lost.set()
        if self._client is None:
            self._scope.cancel()
        if self._owner is not None:
            # The scope, not the task, is cancelled in the end: the SDK shields its clean-up from scopes only.
            done, _ = await asyncio.wait({self._owner}, timeout=CLOSE_SECONDS)
            if not done:
                self._scope.cancel()
                await asyncio.wait({self._owner}, timeout=1.0)


class _Watched:
    """A transport that tells when the server's side ends, and of what comes from it."""

    def __init__(self, inner: Any, *watchers: Callable[..., None]) -> None:
        self.inner, self.watchers = inner, watchers

    async def __aenter__(self) -> Any:
        reader, writer = await self.inner.__aenter__()
        return _WatchedReader(reader, *self.watchers), writer

    async def __aexit__(self, *problem: Any) -> Any:
        return await self.inner.__aexit__(*problem)


class _WatchedReader:
    def __init__(self, inner: Any, ended: Callable[[], None], heard: Callable[[Any], None]) -> None:
        self.inner, self.ended, self.heard = inner, ended, heard

    @property
    def last_context(self) -> contextvars.Context | None:
        return getattr(self.inner, "last_context", None)

    def __aiter__(self) -> _WatchedReader:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await self.inner.__anext__()
        except (StopAsyncIteration, anyio.ClosedResourceError):
            self.ended()
            raise
        self.heard(item)
        return item

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def __aenter__(self) -> _WatchedReader:
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self.aclose()


async def _list_tools(client: Client) -> list[OfferedTool]:
    tools, cursor = [], None
    info = client.server_info
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            hints = tool.annotations
            safe = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
            version = info.version if info is not None else ""
            schemas = dict(tool.input_schema), tool.output_schema
            tools.append(OfferedTool(tool.name, tool.description or "", *schemas, safe, version))
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _cause(error: BaseException | None) -> str:
    """The innermost reason, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None or isinstance(error, asyncio.CancelledError):
        return "the connection broke"
    if isinstance(error, httpx2.HTTPStatusError):
        return f"it answered with HTTP status {error.response.status_code}"
    if isinstance(error, httpx2.ConnectError):
        return "nothing answers at that address; is the server running?"
    if isinstance(error, MCPError) and error.message in (CLOSED, SESSION_GONE):
        return "it closed the connection" if error.message == CLOSED else "it no longer knows our session"
    if isinstance(error, ServerDown):
        return str(error)
    text = str(error).splitlines()[0][:200] if str(error) else ""
    return f"{type(error).__name__}: {text}".rstrip(": ")
