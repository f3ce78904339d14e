"""A connection to an MCP server. One task enters the SDK's client and stays in it until the connection ends; every
error is raised as `ServerDown`. Import this module and `stdio` lazily: they import the SDK, which takes a second."""

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

from TrainingFactory.common.texts import escape_control
from TrainingFactory.tools.mcp.content import has_images, make_tool_result
from TrainingFactory.tools.mcp.offers import OfferedTool
from TrainingFactory.tools.mcp.server_config import ServerConfig, ServerDown
from TrainingFactory.tools.mcp.stdio import MAX_MESSAGE_BYTES, TOO_LONG_MESSAGE, ServerOutput, open_stdio
from TrainingFactory.tools.schema import check_schema, make_validator
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec

CLOSE_TIMEOUT_SECONDS = 8.0  # longer than the stdio transport needs to kill a server that does not exit
HEALTH_CHECK_SECONDS = 30.0  # at least the time-out of a call, which may keep the server busy
MAX_PAGES = 100
# Texts of the SDK for connection errors, which it reports like answers of the server.
SESSION_GONE = "Session terminated"  # an HTTP server that was restarted
END_REASONS = {"Connection closed": "it closed the connection", SESSION_GONE: "it has dropped the session"}
STREAM_CUT = "SSE stream ended without a response"  # ends one call, not the connection
HTTP_ERROR = "Server returned an error response"
IDLE_TIMEOUT_SECONDS = 24 * 3600.0  # seconds; an idle stream is no error, and calls have their own time-outs
_ANSWER_ADAPTER: TypeAdapter[Any] = TypeAdapter(dict[str, Any])

# Our own errors report what the SDK logs, and the logs of its HTTP client contain URLs with secrets.
for _name in ("mcp", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)


class Connection:
    """A connection to an MCP server. `on_tools_listed` is called with the tool list on connect and on every change."""

    def __init__(self, config: ServerConfig, on_tools_listed: Callable[[list[OfferedTool]], None]) -> None:
        self.config = config
        self.lost_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done at the end
        self.num_active_calls = 0  # calls in flight
        self.has_answered = False  # whether any call was answered
        self._on_tools_listed = on_tools_listed
        self._output_validators: dict[str, Validator] = {}  # of structured results, by tool
        self._client: Client | None = None
        self._server_output = ServerOutput()
        self._end_reason = ""  # why the connection ended
        self._has_session = False
        self._num_messages = 0  # received so far
        self._health_check_task: asyncio.Task[None] | None = None
        self._relist_task: asyncio.Task[None] | None = None
        self._cancel_scope = anyio.CancelScope()
        self._run_task: asyncio.Task[None] | None = None
        self._secrets = config.secrets

    async def open(self) -> None:
        """Connect and list the tools. Raise ServerDown if that fails, with nothing left running."""
        ready_future = asyncio.get_running_loop().create_future()
        self._run_task = asyncio.create_task(self._run_connection(ready_future))
        try:
            await asyncio.shield(ready_future)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def _run_connection(self, ready_future: asyncio.Future[None]) -> None:
        connect_error: BaseException | None = None
        timeout = self.config.settings.connect_timeout
        try:
            with self._cancel_scope:
                self._cancel_scope.deadline = anyio.current_time() + timeout
                async with contextlib.AsyncExitStack() as stack:
                    await self._connect(stack)
                    self._cancel_scope.deadline = float("inf")
                    ready_future.set_result(None)
                    await asyncio.wait({self.lost_future})
        except BaseException as error:  # the SDK also raises CancelledError and exception groups
            connect_error = error
        self._client = None
        for task in (self._relist_task, self._health_check_task):
            if task is not None:
                task.cancel()
        reason = (
            f"no answer within {timeout:g} s (tfactory.connect_timeout)"
            if connect_error is None
            else _describe_root_cause(connect_error)
        )
        self._mark_lost(reason)
        if not ready_future.done():
            self._end_reason = reason  # more specific than the reason that `_mark_lost` may have kept
            ready_future.set_exception(self.make_down_error("failed to connect", was_sent=False))
            ready_future.exception()  # mark it as retrieved, in case `open` no longer waits

    async def _connect(self, stack: contextlib.AsyncExitStack) -> None:
        transport = await self._open_transport(stack)
        # Private sessions need the handshake of older protocols: the newest has no sessions over HTTP.
        needs_session = self.config.settings.isolation != "shared" and self.config.transport != "stdio"
        client = Client(
            self._watch_transport(transport),
            mode="legacy" if needs_session else "auto",
            cache=None,
            message_handler=self._on_message,
        )
        await stack.enter_async_context(client)
        if needs_session and self.config.transport == "http" and not self._has_session:
            raise ServerDown("it has no sessions, which isolation session needs; write isolation shared")
        await self._list_tools(client)
        self._client = client
        capability = client.server_capabilities.tools
        if capability is not None and capability.list_changed and client.protocol_version >= "2026":
            self._relist_task = asyncio.create_task(self._relist_tools(client, subscribes=True))

    async def _open_transport(self, stack: contextlib.AsyncExitStack) -> Any:
        config = self.config
        if config.transport == "sse":
            return sse_client(config.url, config.headers, timeout=30.0, sse_read_timeout=IDLE_TIMEOUT_SECONDS)
        if config.transport == "http":
            http_client = httpx2.AsyncClient(
                headers=config.headers,
                timeout=httpx2.Timeout(30.0, read=IDLE_TIMEOUT_SECONDS, pool=IDLE_TIMEOUT_SECONDS),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
                event_hooks={"response": [self._on_response]},
            )
            client = await stack.enter_async_context(http_client)
            return streamable_http_client(
                config.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
            )
        return open_stdio(config, stack.enter_context(self._server_output.open_stderr()))

    # messages from the server

    @contextlib.asynccontextmanager
    async def _watch_transport(self, transport: Any) -> AsyncIterator[Any]:
        async with transport as (reader, writer):
            on_end = partial(self._mark_lost, "it closed the connection")
            yield _WatchedReader(reader, self._count_message, on_end), writer

    def _count_message(self, message: Any) -> None:
        self._num_messages += 1
        if isinstance(message, ValidationError):
            self._server_output.count_invalid_line(message)

    async def _on_response(self, response: httpx2.Response) -> None:
        self._has_session = self._has_session or "mcp-session-id" in response.headers
        if "event-stream" not in response.headers.get("content-type", ""):  # the SDK limits events
            response.stream = _BoundedStream(response.stream)

    async def _on_message(self, message: Any) -> None:
        tools_changed = getattr(message, "method", None) == "notifications/tools/list_changed"
        if tools_changed and self._client is not None:
            if self._relist_task is not None:
                self._relist_task.cancel()
            self._relist_task = asyncio.create_task(self._relist_tools(self._client))

    async def _relist_tools(self, client: Client, subscribes: bool = False) -> None:
        """List the tools again: once, or with `subscribes` at every change, as the newest protocol requires."""
        with contextlib.suppress(Exception):  # a lost connection is detected elsewhere
            if not subscribes:
                return await self._list_tools(client)
            async with client.listen(tools_list_changed=True) as tool_changes:
                async for _ in tool_changes:
                    await self._list_tools(client)

    async def _list_tools(self, client: Client) -> None:
        tools, cursor = [], None
        version = client.server_info.version if client.server_info is not None else ""
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                hints = tool.annotations
                is_idempotent = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
                schemas = dict(tool.input_schema), tool.output_schema
                tools.append(OfferedTool(tool.name, tool.description or "", *schemas, is_idempotent, version))
            if (cursor := page.next_cursor) is None:
                break
        self._output_validators = {}
        for tool in tools:
            with contextlib.suppress(ValueError):  # ignore an invalid output schema
                if tool.output_schema is not None:
                    check_schema(ToolSpec(tool.name, parameters=tool.output_schema))
                    self._output_validators[tool.name] = make_validator(tool.output_schema)
        self._on_tools_listed(tools)

    # calls

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool and return the server's result; raise ServerDown on a lost connection. Cancelling this call also
        cancels it on the server."""
        client = self._client
        if client is None or self.lost_future.done():
            raise self.make_down_error("is not available", was_sent=False)
        self.num_active_calls += 1
        try:
            answer = await self._request_answer(client, name, arguments)
        except MCPError as error:
            return self._make_error_result(name, error)
        except (OSError, httpx2.HTTPError, anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            self._mark_lost(_describe_root_cause(error))
            raise self.make_down_error("was lost during the call") from None
        except (RuntimeError, ValidationError) as error:  # an answer that breaks the protocol
            return self._make_invalid_result(name, str(error) or type(error).__name__)
        finally:
            self.num_active_calls -= 1
        self.has_answered = True
        if answer.get("resultType") == "input_required":
            return self._make_invalid_result(name, "it requests user input, which is not supported")
        validator = None if answer.get("isError") else self._output_validators.get(name)
        if validator is not None and not validator.is_valid(answer.get("structuredContent")):
            return self._make_invalid_result(name, "it does not match the output schema of the tool")
        convert_answer = partial(make_tool_result, answer, self.config.settings.error_text, self._secrets)
        return await in_thread(convert_answer) if has_images(answer) else convert_answer()

    async def _request_answer(self, client: Client, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Send a call and return the server's raw answer. The request runs in its own task, because the SDK may cancel
        a waiting task when the connection breaks, or never wake it."""
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments))
        # `call_tool` would build a pydantic model of the answer only for us to take it apart again.
        request_task = asyncio.create_task(client.session.send_request(request, _ANSWER_ADAPTER))
        request_task.add_done_callback(lambda task: task.cancelled() or task.exception())  # or asyncio warns
        num_messages_before = self._num_messages
        try:
            await asyncio.wait({request_task, self.lost_future}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # by the caller, usually after a time-out
            request_task.cancel()
            if self._num_messages == num_messages_before and self._health_check_task is None:
                self._health_check_task = asyncio.create_task(self._check_health(client))
            raise
        if not request_task.done() or request_task.cancelled():
            request_task.cancel()
            self._mark_lost("the connection broke")
            raise self.make_down_error("was lost during the call")
        return request_task.result()

    async def _check_health(self, client: Client) -> None:
        """Mark the connection as lost if the server sent nothing during a whole call and ignores a new request."""
        num_messages_before = self._num_messages
        timeout = max(HEALTH_CHECK_SECONDS, self.config.settings.timeout or 0.0)
        with contextlib.suppress(Exception), anyio.move_on_after(timeout):
            await client.list_tools()
        self._health_check_task = None
        if self._num_messages == num_messages_before:
            self._mark_lost("it stopped answering")

    def _make_error_result(self, name: str, error: MCPError) -> ToolResult:
        """Return the server's error as a result; raise ServerDown if the connection ended with it."""
        if error.message in (*END_REASONS, STREAM_CUT):
            if error.message != STREAM_CUT:
                self._mark_lost(_describe_root_cause(error))
            raise self.make_down_error("was lost during the call", was_sent=error.message != SESSION_GONE)
        self.has_answered = True
        text = self.config.hide_secrets(error.message)
        error_kind = "unavailable" if error.message == HTTP_ERROR else "exception"
        return ToolResult(f"{name} failed: {text}", ok=False, error=error_kind)

    def _make_invalid_result(self, name: str, problem: str) -> ToolResult:
        text = self.config.hide_secrets(problem.splitlines()[0][:300])
        return ToolResult(f"{name} returned an invalid answer: {text}", ok=False, error="exception")

    # end of the connection

    def _mark_lost(self, reason: str) -> None:
        if not self.lost_future.done():
            self._end_reason = reason
            self.lost_future.set_result(None)

    def make_down_error(self, event: str = "was lost", was_sent: bool = True) -> ServerDown:
        """Return a ServerDown error that names the event and its reason."""
        reason = f": {self._end_reason}" if self._end_reason else ""
        text = f"server {self.config.name!r} ({self.config.target}) {event}{reason}{self._server_output.quote_output()}"
        return ServerDown(escape_control(self.config.hide_secrets(text)), was_sent)

    async def close(self) -> None:
        """Close the connection and wait until it has ended, and with it the server's process if we started it."""
        was_connected = self._client is not None
        self._mark_lost("it was closed")
        if not was_connected:
            self._cancel_scope.cancel()
        if self._run_task is not None:
            # If need be, cancel the scope, not the task: the SDK shields its clean-up from scopes only.
            done_tasks, _ = await asyncio.wait({self._run_task}, timeout=CLOSE_TIMEOUT_SECONDS)
            if not done_tasks:
                self._cancel_scope.cancel()
                await asyncio.wait({self._run_task}, timeout=1.0)


class _BoundedStream(httpx2.AsyncByteStream):
    """Body of an HTTP response with a size limit; above it, the stream raises an error, which the SDK returns."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in self.stream:
            num_bytes += len(chunk)
            if num_bytes > MAX_MESSAGE_BYTES:
                raise httpx2.StreamError(TOO_LONG_MESSAGE)
            yield chunk

    async def aclose(self) -> None:
        await self.stream.aclose()


class _WatchedReader:
    """Read stream of a transport with callbacks for every item and for the end of the stream."""

    def __init__(self, stream: Any, on_item: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self.stream, self.on_item, self.on_end = stream, on_item, on_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __aiter__(self) -> _WatchedReader:
        return self

    async def __anext__(self) -> Any:
        try:
            message = await self.stream.__anext__()
        except (StopAsyncIteration, anyio.ClosedResourceError):
            self.on_end()
            raise
        self.on_item(message)
        return message

    async def __aenter__(self) -> _WatchedReader:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.stream.aclose()


def _describe_root_cause(error: BaseException) -> str:
    """Return the root cause of an error in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, asyncio.CancelledError):
        return "the connection broke"
    if isinstance(error, httpx2.ConnectError):
        return "nothing answers at that address; start the server, or correct its url"
    if isinstance(error, MCPError) and error.message in END_REASONS:
        return END_REASONS[error.message]
    if isinstance(error, ServerDown):
        return str(error)
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:200]}".rstrip(": ")
