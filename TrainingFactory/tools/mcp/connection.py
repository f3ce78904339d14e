"""One connection to one MCP server; it and `stdio` alone import the SDK (which takes a second: import it where a
connection is opened). One task enters the SDK's client and waits in it for the end; whatever goes wrong becomes
`ServerDown`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import httpx2
from jsonschema.protocols import Validator
from mcp import Client, MCPError
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolRequest, CallToolRequestParams
from pydantic import TypeAdapter, ValidationError

from TrainingFactory.common.texts import clean
from TrainingFactory.tools.mcp.content import tool_result
from TrainingFactory.tools.mcp.offers import OfferedTool
from TrainingFactory.tools.mcp.server_config import ServerConfig, ServerDown
from TrainingFactory.tools.mcp.stdio import MAX_MESSAGE_BYTES, TOO_LONG, Noise, stdio_transport
from TrainingFactory.tools.schema import check_schema, validator_of
from TrainingFactory.types import ToolResult, ToolSpec

CLOSE_SECONDS = 8.0  # the patience with a server that ignores its end, and a little more
CHECK_SECONDS = 30.0  # for a sign of life, or a call's time-out if that is longer: it may be busy with one
MAX_PAGES = 100
# How the SDK words, as if they were the server's answers, what happened to the connection.
SESSION_GONE = "Session terminated"  # an HTTP server that was restarted
ENDS = {"Connection closed": "it closed the connection", SESSION_GONE: "it no longer knows our session"}
CUT_OFF = "SSE stream ended without a response"  # this call's stream alone
HTTP_ERROR = "Server returned an error response"
LONG = 24 * 3600.0  # an idle stream is no error; calls have time-outs of their own
_AS_IT_CAME: TypeAdapter[Any] = TypeAdapter(dict[str, Any])

# What the SDK logs is told in our own errors, and what its HTTP client logs has URLs with secrets.
for _name in ("mcp", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)


class Connection:
    """`on_tools` is told of the list of tools, at first and whenever the server says that it changed."""

    def __init__(self, config: ServerConfig, on_tools: Callable[[list[OfferedTool]], None]) -> None:
        self.config = config
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done once it is gone
        self.busy = 0  # calls in flight
        self.served = False  # a call was answered
        self._on_tools = on_tools
        self._outputs: dict[str, Validator] = {}  # what structured answers must be like, by tool
        self._client: Client | None = None
        self._noise = Noise()
        self._reason = ""
        self._has_session = False
        self._messages = 0  # that came in
        self._checking: asyncio.Task[None] | None = None
        self._relisting: asyncio.Task[None] | None = None
        self._scope = anyio.CancelScope()
        self._owner: asyncio.Task[None] | None = None
        self._secrets = config.secrets

    async def open(self) -> None:
        """Connect, and list the tools; raise ServerDown with nothing left running."""
        ready = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready))
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
                    await asyncio.wait({self.lost})
        except BaseException as error:  # also CancelledError and groups, which the SDK raises when HTTP fails
            problem = error
        self._client = None
        for task in (self._relisting, self._checking):
            if task is not None:
                task.cancel()
        reason = f"it did not answer within {limit:g} s" if problem is None else _cause(problem)
        self._lose(reason)
        if not ready.done():
            self._reason = reason  # it says more than that the connection ended
            ready.set_exception(self.down("could not be connected", sent=False))
            ready.exception()  # looked at, in case that nobody waits any more

    async def _enter(self, stack: contextlib.AsyncExitStack) -> None:
        transport = await self._transport(stack)
        # A session of its own needs the handshake of older protocols: the newest one has no sessions over HTTP.
        own_session = self.config.settings.isolation != "shared" and self.config.transport != "stdio"
        client = Client(
            self._watched(transport),
            mode="legacy" if own_session else "auto",
            cache=None,
            message_handler=self._notified,
        )
        await stack.enter_async_context(client)
        if own_session and self.config.transport == "http" and not self._has_session:
            raise ServerDown("it gives out no sessions, which isolation session needs")
        await self._list_tools(client)
        self._client = client
        changes = client.server_capabilities.tools
        if changes is not None and changes.list_changed and client.protocol_version >= "2026":
            self._relisting = asyncio.create_task(self._relist(client, subscribe=True))

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        config = self.config
        if config.transport == "sse":
            return sse_client(config.url, config.headers, timeout=30.0, sse_read_timeout=LONG)
        if config.transport == "http":
            http = httpx2.AsyncClient(
                headers=config.headers,
                timeout=httpx2.Timeout(30.0, read=LONG, pool=LONG),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
                event_hooks={"response": [self._saw_response]},
            )
            client = await stack.enter_async_context(http)
            return streamable_http_client(
                config.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
            )
        return stdio_transport(config, stack.enter_context(self._noise.stderr()))

    # what comes from the server

    @contextlib.asynccontextmanager
    async def _watched(self, transport: Any) -> AsyncIterator[Any]:
        async with transport as (reader, writer):
            ended = partial(self._lose, "it closed the connection")
            yield _WatchedReader(reader, self._heard, ended), writer

    def _heard(self, item: Any) -> None:
        self._messages += 1
        if isinstance(item, ValidationError):
            self._noise.count(item)

    async def _saw_response(self, response: httpx2.Response) -> None:
        self._has_session = self._has_session or "mcp-session-id" in response.headers
        if "event-stream" not in response.headers.get("content-type", ""):  # the SDK bounds events
            response.stream = _Bounded(response.stream)

    async def _notified(self, message: Any) -> None:
        changed = getattr(message, "method", None) == "notifications/tools/list_changed"
        if changed and self._client is not None:
            if self._relisting is not None:
                self._relisting.cancel()
            self._relisting = asyncio.create_task(self._relist(self._client))

    async def _relist(self, client: Client, subscribe: bool = False) -> None:
        """List the tools again, once or at every change: the newest protocol tells of them only those who
        subscribe. A connection that dies meanwhile is noticed elsewhere."""
        with contextlib.suppress(Exception):
            if not subscribe:
                return await self._list_tools(client)
            async with client.listen(tools_list_changed=True) as changes:
                async for _ in changes:
                    await self._list_tools(client)

    async def _list_tools(self, client: Client) -> None:
        tools, cursor = [], None
        version = client.server_info.version if client.server_info is not None else ""
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                hints = tool.annotations
                safe = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
                schemas = dict(tool.input_schema), tool.output_schema
                tools.append(OfferedTool(tool.name, tool.description or "", *schemas, safe, version))
            if (cursor := page.next_cursor) is None:
                break
        self._outputs = {}
        for tool in tools:
            with contextlib.suppress(ValueError):  # a promise that cannot be read holds for nothing
                if tool.output is not None:
                    check_schema(ToolSpec(tool.name, parameters=tool.output))
                    self._outputs[tool.name] = validator_of(tool.output)
        self._on_tools(tools)

    # calls

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Return the server's answer; raise ServerDown. Cancelling the call cancels it on the server."""
        client = self._client
        if client is None or self.lost.done():
            raise self.down("is not available", sent=False)
        self.busy += 1
        try:
            answer = await self._answer(client, name, arguments)
        except MCPError as error:
            return self._refused(name, error)
        except (OSError, httpx2.HTTPError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            self._lose(_cause(error))
            raise self.down("was lost during the call") from None
        except (RuntimeError, ValidationError) as error:  # an answer that breaks the protocol
            return self._invalid(name, str(error) or type(error).__name__)
        finally:
            self.busy -= 1
        self.served = True
        if answer.get("resultType") == "input_required":
            return self._invalid(name, "it asks for input, and nobody is there to give it")
        promised = None if answer.get("isError") else self._outputs.get(name)
        if promised is not None and not promised.is_valid(answer.get("structuredContent")):
            return self._invalid(name, "it does not fit the server's own output schema")
        return tool_result(answer, self.config.settings.error_text, self._secrets)

    async def _answer(self, client: Client, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return what came over the wire. The request is a task of its own: when a connection dies, the SDK may
        cancel whoever waits, or never wake them."""
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        # Not `call_tool`, which builds a model of the answer that we would take apart again.
        sending = asyncio.create_task(client.session.send_request(request, _AS_IT_CAME))
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio reports it
        before = self._messages
        try:
            await asyncio.wait({sending, self.lost}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the caller's own wish, mostly because it took too long
            sending.cancel()
            if self._messages == before and self._checking is None:
                self._checking = asyncio.create_task(self._check(client))
            raise
        if not sending.done() or sending.cancelled():
            sending.cancel()
            self._lose("the connection broke")
            raise self.down("was lost during the call")
        return sending.result()

    async def _check(self, client: Client) -> None:
        """Give the server up if it was silent for the whole of a call, and gives no sign of life now."""
        before = self._messages
        limit = max(CHECK_SECONDS, self.config.settings.timeout or 0.0)
        with contextlib.suppress(Exception), anyio.move_on_after(limit):
            await client.list_tools()
        self._checking = None
        if self._messages == before:
            self._lose("it stopped answering")

    def _refused(self, name: str, error: MCPError) -> ToolResult:
        """Return an error in place of an answer; raise ServerDown where that is how the connection ended."""
        if error.message in (*ENDS, CUT_OFF):
            if error.message != CUT_OFF:
                self._lose(_cause(error))
            raise self.down("was lost during the call", sent=error.message != SESSION_GONE)
        self.served = True
        text = self.config.hide(error.message)
        kind = "unavailable" if error.message == HTTP_ERROR else "exception"
        return ToolResult(f"{name} failed: {text}", ok=False, error=kind)

    def _invalid(self, name: str, problem: str) -> ToolResult:
        text = self.config.hide(problem.splitlines()[0][:300])
        return ToolResult(f"{name} gave an invalid answer: {text}", ok=False, error="exception")

    # the end

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self._reason = reason
            self.lost.set_result(None)

    def down(self, what: str = "was lost", sent: bool = True) -> ServerDown:
        """Return what happened, as an error to raise or to log."""
        reason = f": {self._reason}" if self._reason else ""
        text = f"server {self.config.name!r} ({self.config.target}) {what}{reason}{self._noise.story()}"
        return ServerDown(clean(self.config.hide(text)), sent)

    async def close(self) -> None:
        """End the connection, and the process where it is ours; come back when both are gone."""
        connected = self._client is not None
        self._lose("it was closed")
        if not connected:
            self._scope.cancel()
        if self._owner is not None:
            # The scope, not the task, is cancelled in the end: the SDK shields its clean-up from scopes only.
            done, _ = await asyncio.wait({self._owner}, timeout=CLOSE_SECONDS)
            if not done:
                self._scope.cancel()
                await asyncio.wait({self._owner}, timeout=1.0)


class _Bounded(httpx2.AsyncByteStream):
    """The body of an HTTP response, up to a size; the SDK makes an answer of the error."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for data in self.inner:
            size += len(data)
            if size > MAX_MESSAGE_BYTES:
                raise httpx2.StreamError(TOO_LONG)
            yield data

    async def aclose(self) -> None:
        await self.inner.aclose()


class _WatchedReader:
    """The server's side of a transport; tells of everything that comes from there, and of its end."""

    def __init__(self, inner: Any, heard: Callable[[Any], None], ended: Callable[[], None]) -> None:
        self.inner, self.heard, self.ended = inner, heard, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

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

    async def __aenter__(self) -> _WatchedReader:
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self.inner.aclose()


def _cause(error: BaseException) -> str:
    """Return the innermost reason, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError):
        return "the connection broke"
    if isinstance(error, httpx2.ConnectError):
        return "nothing answers at that address; is the server running?"
    if isinstance(error, MCPError) and error.message in ENDS:
        return ENDS[error.message]
    if isinstance(error, ServerDown):
        return str(error)
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first[:200]}".rstrip(": ")
