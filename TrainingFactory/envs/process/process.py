"""One process of an environment: requests and answers as lines of JSON over its stdin and stdout."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from TrainingFactory.common.workers import groups
from TrainingFactory.tools import sandbox

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 8 * 2**20
GRACE_SECONDS = 2.0  # after closing stdin
LAUNCHER_FILE = Path(sandbox.__file__).with_name("launch.py")
WARNING_PREFIX = b"unrestricted:"  # written by launch.py
log = logging.getLogger(__name__)
_ID_PATTERN = re.compile(rb'\s*\{\s*"id":\s*(\d+)')
_ID_PREFIX_BYTES = 200  # of a line that is too long


class ProcessLost(Exception):
    """Raised if the process has ended or cannot be started."""


class RequestFailed(Exception):
    """Raised if the environment answered a request with an error."""


class EpisodeLost(RequestFailed):
    """Raised if the environment lost this episode, for example because the episode's server closed the connection."""


@dataclass(slots=True, frozen=True)
class Program:
    """The command and the options with which the processes of an environment are started."""

    command: Sequence[str]
    name: str  # the part of the environment_id after the colon
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Sequence[str] = ()  # names of environment variables to inherit
    readable: Sequence[str] = ()
    confined: bool = True
    start_seconds: float = 120.0


class EnvironmentProcess:
    """A running program. `episode_names` are its open episodes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.episode_names: set[str] = set()
        self.description: dict[str, Any] = {}  # answer to `version`
        self.error: str | None = None  # why the process is lost
        self._id_counter = itertools.count(1)
        self._pending_answers: dict[int, asyncio.Future[Any]] = {}
        self._abandoned_ids: set[int] = set()  # requests whose caller no longer waits
        self._line_buffer = bytearray()
        self._line_size = 0
        self._stderr = b""
        self._num_bad_lines = 0
        self._process: asyncio.subprocess.Process | None = None
        self._folder = tempfile.mkdtemp(prefix="tfactory-environment-")
        self._lifeline_fd = -1
        self._reader_tasks: list[asyncio.Task[None]] = []
        self._end_task: asyncio.Task[None] | None = None
        self.start_task = asyncio.ensure_future(self._start_process())

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_responsive(self) -> bool:
        """Return whether the process is alive and has answered every request whose caller stopped waiting."""
        return self.error is None and not self._abandoned_ids

    async def wait_until_ready(self) -> None:
        """Wait until the process has answered `version`."""
        await asyncio.shield(self.start_task)

    async def request(self, method: str, **fields: Any) -> dict[str, Any]:
        """Send a request and return its result; raise RequestFailed, EpisodeLost or ProcessLost if it fails."""
        if self.error is not None:
            raise ProcessLost(self.error)
        request_id = next(self._id_counter)
        line = json.dumps({"id": request_id, "method": method, **fields}, default=str).encode() + b"\n"
        if len(line) > MAX_MESSAGE_BYTES:
            raise RequestFailed(f"{method}: the request has {len(line)} bytes, more than {MAX_MESSAGE_BYTES}")
        assert self._process is not None and self._process.stdin is not None
        answer_future = self._pending_answers[request_id] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(line)
            with contextlib.suppress(ConnectionError):  # the reader reports the end of the process
                await self._process.stdin.drain()
            result = await answer_future
        except asyncio.CancelledError:
            if self._pending_answers.pop(request_id, None) is not None:
                self._abandoned_ids.add(request_id)
            raise
        if not isinstance(result, dict):
            raise RequestFailed(f"{method}: the result must be an object, not {str(result)[:80]}")
        return result

    def notify(self, method: str, **fields: Any) -> None:
        """Send a request without waiting for its answer."""
        if self.error is None and self._process is not None and self._process.stdin is not None:
            line = json.dumps({"id": next(self._id_counter), "method": method, **fields}).encode() + b"\n"
            self._process.stdin.write(line)

    async def _start_process(self) -> None:
        try:
            async with asyncio.timeout(self.program.start_seconds):
                await self._launch()
                fields = {"protocol": PROTOCOL_VERSION, "name": self.program.name, "args": self.program.args}
                self.description = await self.request("version", **fields)
        except TimeoutError:
            reason = f"it did not answer `version` within {self.program.start_seconds:g} s"
            await self._fail_requests(reason)
            raise ProcessLost(self.error) from None
        except OSError as error:
            await self._fail_requests(f"it cannot be started: {error.strerror}")
            raise ProcessLost(self.error) from error
        except RequestFailed as error:
            await self._fail_requests(str(error))
            raise
        if self.description.get("protocol") != PROTOCOL_VERSION:
            protocol = self.description.get("protocol")
            await self._fail_requests(
                f"it speaks protocol {protocol!r}; TrainingFactory speaks protocol {PROTOCOL_VERSION}"
            )
            raise RequestFailed(self.error)

    async def _launch(self) -> None:
        from TrainingFactory.common.workers.child import kill_at_hangup  # not available on Windows

        program, command = self.program, list(self.program.command)
        if program.confined:
            settings = {"folder": self._folder, "readable": list(program.readable)}
            command = [sys.executable, "-I", "-S", str(LAUNCHER_FILE), json.dumps(settings), *command]
        env = groups.inherit_variables(list(program.env)) | dict.fromkeys(("HOME", "TMPDIR"), self._folder)
        read_fd, self._lifeline_fd = os.pipe()  # the kernel kills the process group when our end closes
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder,
                env=env,
                pass_fds=[read_fd],
                start_new_session=True,
            )
            kill_at_hangup(read_fd, self._process.pid)
        finally:
            os.close(read_fd)
        self._reader_tasks = list(map(asyncio.ensure_future, (self._read_stdout(), self._read_stderr())))

    async def _read_stdout(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while chunk := await self._process.stdout.read(65536):
            *line_ends, line_start = chunk.split(b"\n")
            for line_end in line_ends:
                self._append_to_line(line_end)
                self._finish_line()
            self._append_to_line(line_start)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                await _wait_for_exit(self._process)
                await self._reader_tasks[1]  # the end of stderr explains the exit
        await self._fail_requests(_describe_exit(self._process.returncode))

    async def _read_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            if not self._stderr and chunk.startswith(WARNING_PREFIX):
                _warn_unrestricted(self.program.name, chunk.split(b"\n")[0][len(WARNING_PREFIX) :].decode())
            self._stderr = (self._stderr + chunk)[-groups.MAX_STDERR_BYTES :]

    def _append_to_line(self, chunk: bytes) -> None:
        self._line_buffer += chunk
        self._line_size += len(chunk)
        if self._line_size > MAX_MESSAGE_BYTES:
            del self._line_buffer[_ID_PREFIX_BYTES:]

    def _finish_line(self) -> None:
        line, num_bytes = bytes(self._line_buffer), self._line_size
        self._line_buffer.clear()
        self._line_size = 0
        if num_bytes > MAX_MESSAGE_BYTES:
            id_match = _ID_PATTERN.match(line)
            answer: Any = id_match and {
                "id": int(id_match[1]),
                "error": {"message": "the answer has more than 8 MiB"},
            }
        else:
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get("id"), int):
            self._num_bad_lines += bool(line.strip())
            return
        self._abandoned_ids.discard(answer["id"])
        future = self._pending_answers.pop(answer["id"], None)
        if future is None or future.done():
            return
        if (error := answer.get("error")) is not None:
            future.set_exception(_make_exception(error))
        else:
            future.set_result(answer.get("result"))

    async def _fail_requests(self, reason: str) -> None:
        """Record the reason why the process is lost, fail its pending requests, and end it."""
        if self.error is None:
            note = f"; {self._num_bad_lines} lines on stdout are not answers" if self._num_bad_lines else ""
            self.error = f"environment {self.program.name}: {reason}{note}{groups.quote_stderr(self._stderr)}"
        futures, self._pending_answers = self._pending_answers, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(ProcessLost(self.error))
        self._end_task = self._end_task or asyncio.ensure_future(self._end_process())

    async def close(self) -> None:
        """End the process. Further calls wait for its end."""
        self.error = self.error or f"environment {self.program.name}: the process was closed"
        self._end_task = self._end_task or asyncio.ensure_future(self._end_process())
        await asyncio.shield(self._end_task)

    async def _end_process(self) -> None:
        """Close stdin, then kill the process group and descendants outside of it."""
        process = self._process
        if process is not None:
            children = await asyncio.to_thread(groups.find_offspring, process.pid)
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    await _wait_for_exit(process)
            groups.signal_group(process.pid, signal.SIGKILL)
            for child in children:
                with contextlib.suppress(groups.psutil.Error):
                    child.kill()
            await _wait_for_exit(process)
        self.abandon()

    def abandon(self) -> None:
        """Kill the process without waiting for it, because its event loop has ended."""
        self.error = self.error or "the process was closed"
        if self._process is not None:
            groups.signal_group(self._process.pid, signal.SIGKILL)
            transport = getattr(self._process, "_transport", None)
            if (
                transport is not None
            ):  # no public method closes the pipes while another process holds their ends
                with contextlib.suppress(RuntimeError):
                    transport.close()
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache  # once per environment, not per process
def _warn_unrestricted(name: str, reason: str) -> None:
    log.warning("environment %s can read all of your files:%s", name, reason)


async def _wait_for_exit(process: asyncio.subprocess.Process) -> None:
    while process.returncode is None:  # `wait` would also wait for every process that holds the pipes
        await asyncio.sleep(0.01)


def _make_exception(error: Any) -> Exception:
    if not isinstance(error, dict):
        return RequestFailed(str(error))
    return (EpisodeLost if error.get("lost") is True else RequestFailed)(str(error.get("message")))


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "it closed its stdout"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process exited with status {status}"
