"""The stdio transport: a server in its own process, with one message per line on stdin and stdout. A message that is
too long is never held in memory as a whole; its call gets an error. Processes that the server started end with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TextIO

import anyio
import psutil
from anyio.abc import Process
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError

from TrainingFactory.common.workers.groups import MAX_STDERR_BYTES, find_offspring, quote_stderr, signal_group
from TrainingFactory.tools.mcp.server_config import ServerConfig

MAX_MESSAGE_BYTES = 8 * 2**20  # enough for a large image; parsing more JSON would block the event loop
TOO_LONG_MESSAGE = f"the answer has more than {MAX_MESSAGE_BYTES} bytes"
FASTMCP_SHIM = str(Path(__file__).parent / "fastmcp_shim")
GRACE_SECONDS = 2.0  # after closing stdin, and after SIGTERM
# Servers write the id of an answer first or last, so only the two ends of a long line are searched.
_END_BYTES = 200
_ID_PATTERN = re.compile(
    rb'\A\s*\{\s*(?:"jsonrpc":\s*"2\.0",\s*)?"id":\s*(\d+)|"id":\s*(\d+)\s*(?:,\s*"jsonrpc":\s*"2\.0"\s*)?\}\s*\Z'
)


@contextlib.asynccontextmanager
async def open_stdio(config: ServerConfig, stderr_file: TextIO) -> AsyncIterator[tuple[Any, Any]]:
    """Start the server; yield the streams of incoming and outgoing messages."""
    process = await anyio.open_process(
        [config.command, *config.args],
        env=_make_environment(config),
        cwd=config.cwd,
        stderr=stderr_file,
        start_new_session=True,
    )
    incoming_sender, incoming_receiver = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing_sender, outgoing_receiver = anyio.create_memory_object_stream[SessionMessage](0)
    may_close_stdin = anyio.Event()
    async with anyio.create_task_group() as task_group:
        task_group.start_soon(_read_messages, process, incoming_sender)
        task_group.start_soon(_write_messages, process, outgoing_receiver, incoming_sender, may_close_stdin)
        try:
            yield incoming_receiver, outgoing_sender
        finally:
            incoming_receiver.close()
            with anyio.CancelScope(shield=True):
                await _end_process(process, outgoing_sender, may_close_stdin)
            task_group.cancel_scope.cancel()
    for stream in (incoming_sender, outgoing_receiver):
        stream.close()


def _make_environment(config: ServerConfig) -> dict[str, str]:
    """Return the environment variables of the server. Python servers also get the FastMCP shim."""
    env = get_default_environment() | config.env
    if Path(config.command).name.startswith("python"):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [FASTMCP_SHIM, env.get("PYTHONPATH")]))
    return env


async def _read_messages(process: Process, incoming_sender: Any) -> None:
    assert process.stdout is not None
    splitter = LineSplitter()
    is_closed = False
    try:
        async for chunk in process.stdout:
            for line in () if is_closed else splitter.feed(chunk):
                try:
                    await incoming_sender.send(_parse_message(line))
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    is_closed = True  # keep draining stdout: a process blocked on a full pipe would not exit
    except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        pass
    incoming_sender.close()


def _parse_message(line: bytes | JSONRPCError) -> SessionMessage | Exception:
    if isinstance(line, JSONRPCError):
        return SessionMessage(line)
    try:
        text = line.decode(errors="replace")
        return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValidationError as error:
        return error


async def _write_messages(process: Process, messages: Any, inbox_sender: Any, may_close: anyio.Event) -> None:
    assert process.stdin is not None
    try:
        async for session_message in messages:
            line = session_message.message.model_dump_json(by_alias=True, exclude_unset=True)
            await process.stdin.send(line.encode(errors="replace") + b"\n")
    except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        inbox_sender.close()  # no answers will come
    # Closing stdin ends the process, after which its descendants could no longer be listed.
    await may_close.wait()
    with contextlib.suppress(anyio.BrokenResourceError, OSError):
        await process.stdin.aclose()


async def _end_process(process: Process, outgoing_sender: Any, may_close_stdin: anyio.Event) -> None:
    """Close stdin, then send SIGTERM, then SIGKILL. Also kill descendants outside the process group (browsers)."""
    descendant_processes = await asyncio.to_thread(find_offspring, process.pid)
    may_close_stdin.set()
    outgoing_sender.close()  # `_write_messages` closes stdin after the last message
    for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
        if signal_number is not None:
            signal_group(process.pid, signal_number)
        with anyio.move_on_after(GRACE_SECONDS):
            while process.returncode is None:  # `wait` would also wait for every process that holds the pipes
                await anyio.sleep(0.01)
            break
    signal_group(process.pid, signal.SIGKILL)
    for descendant in descendant_processes:
        with contextlib.suppress(psutil.Error):
            descendant.kill()  # psutil raises if the process has ended and its pid was reused
    # No public method closes our ends of the pipes while another process holds the other ends.
    transport = getattr(getattr(process, "_process", None), "_transport", None)
    if transport is not None:
        transport.close()


class LineSplitter:
    """Splits bytes into lines; of a too long line, keeps both ends, because one of them holds the call's id."""

    def __init__(self) -> None:
        self._line_parts: list[bytes] = []
        self._num_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[bytes | JSONRPCError]:
        *line_ends, line_start = chunk.split(b"\n")
        for line_end in line_ends:
            self._add_chunk(line_end)
            line, self._line_parts = b"".join(self._line_parts), []
            if self._num_bytes <= MAX_MESSAGE_BYTES:
                yield line
            elif match := _ID_PATTERN.search(line[:_END_BYTES]) or _ID_PATTERN.search(line[-_END_BYTES:]):
                error = ErrorData(code=-32603, message=TOO_LONG_MESSAGE)
                yield JSONRPCError(jsonrpc="2.0", id=int(match[1] or match[2]), error=error)
            self._num_bytes = 0
        self._add_chunk(line_start)

    def _add_chunk(self, chunk: bytes) -> None:
        self._line_parts.append(chunk)
        self._num_bytes += len(chunk)
        if self._num_bytes > MAX_MESSAGE_BYTES:
            line = b"".join(self._line_parts)
            self._line_parts = [line[:_END_BYTES], line[-_END_BYTES:]]


class ServerOutput:
    """Collector of a server's output for error messages: the end of stderr and the count of invalid stdout lines."""

    def __init__(self) -> None:
        self._stderr = b""
        self._num_bad_lines, self._bad_line = 0, ""

    def count_invalid_line(self, error: ValidationError) -> None:
        """Count a line on stdout that is not a message."""
        self._num_bad_lines += 1
        line = error.errors(include_url=False, include_context=False)[0].get("input")
        self._bad_line = self._bad_line or str(line)[:80]

    def quote_output(self) -> str:
        """Return this output as details for an error message; empty if there are none."""
        details = ""
        if self._num_bad_lines:
            details = f"; {self._num_bad_lines} lines on stdout are not MCP messages, e.g. {self._bad_line!r}"
        return details + quote_stderr(self._stderr)

    @contextlib.contextmanager
    def open_stderr(self) -> Iterator[TextIO]:
        """Yield a file to which the process writes its stderr. The running event loop reads from it."""
        loop = asyncio.get_running_loop()
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)

        def read_chunk() -> None:
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(read_fd, 65536)
                self._stderr = (self._stderr + chunk)[-MAX_STDERR_BYTES:]
                if not chunk:
                    loop.remove_reader(read_fd)

        loop.add_reader(read_fd, read_chunk)
        try:
            with os.fdopen(write_fd, "w") as file:
                yield file
        finally:
            read_chunk()  # the last output is the most informative
            loop.remove_reader(read_fd)
            os.close(read_fd)
