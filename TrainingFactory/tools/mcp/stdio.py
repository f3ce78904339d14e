"""A server in a process of its own: messages are lines on its stdin and stdout. In place of one that is too long, which
is never held as a whole, comes an error for the call that it answers; and no process that it started outlives it."""

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

from TrainingFactory.tools.mcp.server_config import ServerConfig

MAX_MESSAGE_BYTES = 8 * 2**20  # a large image; reading more JSON keeps everybody else waiting
TOO_LONG = f"the answer has more than {MAX_MESSAGE_BYTES} bytes"
FASTMCP_SHIM = str(Path(__file__).parent / "fastmcp_shim")
GRACE_SECONDS = 2.0  # between the ways to tell a process that it is over
BYTES_KEPT, LINES_SHOWN, LINE_CHARS = 8000, 5, 500  # of what a server writes to stderr
# Servers write the id of an answer first or last; what stands between them is not looked at.
_END_BYTES = 200
_ID = re.compile(
    rb'\A\s*\{\s*(?:"jsonrpc":\s*"2\.0",\s*)?"id":\s*(\d+)|"id":\s*(\d+)\s*(?:,\s*"jsonrpc":\s*"2\.0"\s*)?\}\s*\Z'
)


@contextlib.asynccontextmanager
async def stdio_transport(config: ServerConfig, errors: TextIO) -> AsyncIterator[tuple[Any, Any]]:
    """Start the server and give the streams of what it says and is told."""
    process = await anyio.open_process(
        [config.command, *config.args],
        env=_environment(config),
        cwd=config.cwd,
        stderr=errors,
        start_new_session=True,
    )
    said, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, told = anyio.create_memory_object_stream[SessionMessage](0)
    may_end = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, process, said)
        tasks.start_soon(_write, process, told, said, may_end)
        try:
            yield incoming, outgoing
        finally:
            incoming.close()
            with anyio.CancelScope(shield=True):
                await _end(process, outgoing, may_end)
            tasks.cancel_scope.cancel()
    for stream in (said, told):
        stream.close()


def _environment(config: ServerConfig) -> dict[str, str]:
    """Return the variables of a server's process; a Python also finds mcp 1.x's FastMCP in mcp 2.x."""
    found = get_default_environment() | config.env
    if Path(config.command).name.startswith("python"):
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [FASTMCP_SHIM, found.get("PYTHONPATH")]))
    return found


async def _read(process: Process, said: Any) -> None:
    assert process.stdout is not None
    lines, alone = Lines(), False
    try:
        async for data in process.stdout:
            for line in () if alone else lines.feed(data):
                try:
                    await said.send(_message(line))
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    alone = True  # read on: a process that waits for a reader does not see its end
    except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        pass
    said.close()


def _message(line: bytes | JSONRPCError) -> SessionMessage | Exception:
    if isinstance(line, JSONRPCError):
        return SessionMessage(line)
    try:
        text = line.decode(errors="replace")
        return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValidationError as error:
        return error


async def _write(process: Process, told: Any, said: Any, may_end: anyio.Event) -> None:
    assert process.stdin is not None
    try:
        async for each in told:
            line = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            await process.stdin.send(line.encode(errors="replace") + b"\n")
    except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        said.close()  # whoever waits for an answer waits in vain
    await (
        may_end.wait()
    )  # whoever closes `told` first: without its stdin the process is gone, and nobody knows its own
    with contextlib.suppress(anyio.BrokenResourceError, OSError):
        await process.stdin.aclose()


async def _end(process: Process, outgoing: Any, may_end: anyio.Event) -> None:
    """Close its stdin, ask, and kill, with what it has started; some start what is in no group of theirs, browsers."""
    started = await asyncio.to_thread(_descendants, process.pid)
    may_end.set()
    outgoing.close()  # and its stdin, once all is written
    for way in (None, signal.SIGTERM, signal.SIGKILL):
        if way is not None:
            _signal(process.pid, way)
        with anyio.move_on_after(GRACE_SECONDS):
            while process.returncode is None:  # not `wait`, which also waits for all who hold its pipes
                await anyio.sleep(0.01)
            break
    _signal(process.pid, signal.SIGKILL)
    for each in started:
        with contextlib.suppress(psutil.Error):
            each.kill()  # unless it is gone, and its number is another's
    # Nothing public closes our ends of the pipes, which somebody may still hold.
    transport = getattr(getattr(process, "_process", None), "_transport", None)
    if transport is not None:
        transport.close()


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class Lines:
    """Splits bytes into lines. Of one that is too long only its ends are kept, for the id of the call."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes | JSONRPCError]:
        *whole, rest = data.split(b"\n")
        for end in whole:
            self._add(end)
            line, self._parts = b"".join(self._parts), []
            if self._size <= MAX_MESSAGE_BYTES:
                yield line
            elif found := _ID.search(line[:_END_BYTES]) or _ID.search(line[-_END_BYTES:]):
                error = ErrorData(code=-32603, message=TOO_LONG)
                yield JSONRPCError(jsonrpc="2.0", id=int(found[1] or found[2]), error=error)
            self._size = 0
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > MAX_MESSAGE_BYTES:
            line = b"".join(self._parts)
            self._parts = [line[:_END_BYTES], line[-_END_BYTES:]]


class Noise:
    """The last that a server wrote to stderr, and how many lines on its stdout were no messages."""

    def __init__(self) -> None:
        self._written = b""
        self._not_messages, self._example = 0, ""

    def count(self, error: ValidationError) -> None:
        """Count a line on stdout that is no message."""
        self._not_messages += 1
        found = error.errors(include_url=False, include_context=False)[0].get("input")
        self._example = self._example or str(found)[:80]

    def story(self) -> str:
        """Return what helps to understand a failure."""
        told = ""
        if self._not_messages:
            told = (
                f"; {self._not_messages} lines on its stdout were no MCP messages, such as {self._example!r}"
            )
        lines = [line.rstrip()[:LINE_CHARS] for line in self._written.decode(errors="replace").split("\n")]
        shown = [line for line in lines if line][-LINES_SHOWN:]
        return told + ("; it wrote:\n  " + "\n  ".join(shown) if shown else "")

    @contextlib.contextmanager
    def stderr(self) -> Iterator[TextIO]:
        """Give a file for a process to write to, read by the running loop."""
        loop = asyncio.get_running_loop()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                data = os.read(reader, 65536)
                self._written = (self._written + data)[-BYTES_KEPT:]
                if not data:
                    loop.remove_reader(reader)

        loop.add_reader(reader, read)
        try:
            with os.fdopen(writer, "w") as file:
                yield file
        finally:
            read()  # what came in last tells most
            loop.remove_reader(reader)
            os.close(reader)
