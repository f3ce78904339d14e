"""A function in a separate process, called over pipes: an endless loop or a crash ends with a time limit and does not
affect the caller's process."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

CHILD_SCRIPT = Path(__file__).with_name("child.py")
START_SECONDS = 120.0  # long, because the function may import a lot
EventCallback = Callable[[Any], None]
EXIT_SECONDS = 1.0  # grace period for a process that has closed its pipe
MAX_ANSWER_BYTES = 64 * 2**20  # default for trusted functions


class WorkerError(Exception):
    """Raised if the function raised an exception or could not be loaded."""


class WorkerDied(Exception):
    """Raised if the process ended without an answer. The message follows the worker's name: "died of SIGSEGV"."""


class WorkerTooSlow(Exception):
    """Raised if no answer arrived within the time limit; the process was killed."""


class Worker:
    """Runs a function in a process, one request at a time. The first request starts the process, and a request after a
    crash restarts it. `close`, garbage collection and the end of the program end it. `target` is
    `package.module:function` and takes and returns JSON. With `settings`, the process calls `target(settings)` at its
    start, and the function that this returns answers the requests."""

    def __init__(
        self,
        target: str,
        settings: Any = None,
        *,
        start_seconds: float = START_SECONDS,
        sys_path: Sequence[str] | None = None,  # prepended to the sys.path of the process; None: the parent's
        flags: Sequence[str] = (),  # of the Python interpreter
        max_bytes: int = MAX_ANSWER_BYTES,
        **popen_args: Any,  # arguments of subprocess.Popen: env, cwd, stderr
    ) -> None:
        self.target, self.settings, self.start_seconds = target, settings, start_seconds
        self._sys_path, self._flags, self._max_bytes = sys_path, flags, max_bytes
        self._popen_args = popen_args
        self._child: _Child | None = None
        self._end_child: Callable[[], Any] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False

    @property
    def alive(self) -> bool:
        return self._child is not None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    async def ask(self, message: Any, timeout: float, on_event: EventCallback | None = None) -> Any:
        """Return the answer to a message. Raise WorkerError, or WorkerTooSlow or WorkerDied if the process has ended.
        With `on_event`, the worker's function gets a callback as its second argument, and the events that it reports
        are passed to `on_event` before the answer."""
        if self._loop is not (loop := asyncio.get_running_loop()):  # a worker may outlive a run and its loop
            self._loop, self._lock = loop, asyncio.Lock()
        async with self._lock:
            if self._is_closed:
                raise WorkerDied("was closed")
            if self._child is None:
                self._child = _Child(
                    [sys.executable, "-P", *self._flags, str(CHILD_SCRIPT)], self._popen_args, self._max_bytes
                )
                self._end_child = weakref.finalize(self, self._child.kill_and_wait)
                parent_path = [folder or os.getcwd() for folder in sys.path]
                sys_path = parent_path if self._sys_path is None else list(self._sys_path)
                setup = {"target": self.target, "settings": self.settings, "path": sys_path}
                try:
                    await self._get_answer(setup | {"life": self._child.life_pipe}, self.start_seconds)
                except WorkerTooSlow:
                    raise WorkerDied(f"did not start within {self.start_seconds:g} s") from None
                except WorkerError:
                    self._drop_child()
                    raise
            return await self._get_answer(message, timeout, on_event)

    async def _get_answer(self, message: Any, timeout: float, on_event: EventCallback | None = None) -> Any:
        assert self._child is not None
        try:
            async with asyncio.timeout(timeout):
                answer, error_text = await self._child.exchange(message, on_event)
        except TimeoutError:
            self._drop_child()
            raise WorkerTooSlow(f"did not answer within {timeout:g} s") from None
        except BaseException:
            self._drop_child()
            raise
        if error_text is not None:
            raise WorkerError(error_text)
        return answer

    def _drop_child(self) -> None:
        self._child = None
        self._end_child()

    def kill(self) -> None:
        """Kill the process and its subprocesses immediately. A running call raises WorkerDied."""
        if self._lock.locked() and self._child is not None:
            self._child.kill_group()  # the running call then drops it
        else:
            self._drop_child()

    async def close(self) -> None:
        """Kill the process and do not restart it. Later calls raise WorkerDied."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill_group()
            try:
                await asyncio.to_thread(child.process.wait)  # the kernel may take a while to free its memory
            finally:
                self.kill()


class _Child:
    """A worker process and its pipes."""

    def __init__(self, command: list[str], popen_args: Mapping[str, Any], max_bytes: int) -> None:
        child_stdin, self.command_pipe = os.pipe()
        self.answer_pipe, child_stdout = os.pipe()
        self.life_pipe, self._parent_end = os.pipe()  # the process is killed when the parent's end closes
        try:
            self.process = subprocess.Popen(
                command,
                stdin=child_stdin,
                stdout=child_stdout,
                pass_fds=[self.life_pipe],
                start_new_session=True,  # a process group, to kill it with its subprocesses
                **popen_args,
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            for pipe_end in (child_stdin, child_stdout, self.life_pipe):
                os.close(pipe_end)
        os.set_blocking(self.command_pipe, False)
        os.set_blocking(self.answer_pipe, False)
        self._max_bytes = max_bytes
        self._unparsed = b""  # bytes after the last answer

    async def exchange(self, message: Any, on_event: EventCallback | None) -> tuple[Any, str | None]:
        """Send a message to the process. Return the answer, and the error text if the call failed. A random ticket ties
        an answer to its message, because untrusted code can find the pipe and write to it. Without tickets, one extra
        answer would shift all later answers by one call."""
        ticket = secrets.token_hex(8)
        try:
            await self._send(json.dumps([ticket, message, on_event is not None]).encode() + b"\n")
            # Check the ticket before parsing, which is slow for untrusted data.
            while (line := await self._read_line()).startswith(f'["{ticket}", '.encode()):
                match json.loads(line):
                    case [_, answer, error_text]:
                        return answer, error_text
                    case [_, event] if on_event is not None:
                        on_event(event)
                    case _:
                        break
        except BrokenPipeError:
            raise WorkerDied(await self._describe_exit()) from None
        except (ValueError, RecursionError):  # not JSON
            pass
        raise WorkerDied("was stopped, because its code wrote to the pipe for answers")

    async def _send(self, line: bytes) -> None:
        unsent_bytes = memoryview(line)
        while unsent_bytes:
            try:
                unsent_bytes = unsent_bytes[os.write(self.command_pipe, unsent_bytes) :]
            except BlockingIOError:
                await self._wait_ready(self.command_pipe, for_writing=True)

    async def _read_line(self) -> bytes:
        chunks, num_bytes = [self._unparsed], len(self._unparsed)
        while b"\n" not in chunks[-1]:
            await self._wait_ready(self.answer_pipe)  # yields to other tasks, however fast the process writes
            chunks.append(os.read(self.answer_pipe, 65536))
            num_bytes += len(chunks[-1])
            if not chunks[-1]:
                raise BrokenPipeError
            if num_bytes > self._max_bytes:
                raise WorkerDied(f"was stopped, because it answered with more than {self._max_bytes} bytes")
        line_end, _, self._unparsed = chunks.pop().partition(b"\n")
        return b"".join([*chunks, line_end])

    async def _wait_ready(self, pipe: int, for_writing: bool = False) -> None:
        loop = asyncio.get_running_loop()
        ready_event = asyncio.Event()
        (loop.add_writer if for_writing else loop.add_reader)(pipe, ready_event.set)
        try:
            await ready_event.wait()
        finally:
            (loop.remove_writer if for_writing else loop.remove_reader)(pipe)

    async def _describe_exit(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, EXIT_SECONDS)
        self.kill_group()
        status = await asyncio.to_thread(self.process.wait)
        if status == -signal.SIGKILL:
            return "was killed"
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def kill_group(self) -> None:
        """Kill the process group: the process, if it still runs, and its subprocesses."""
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter if the group has ended
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill_and_wait(self) -> None:
        self.kill_group()
        self.process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.command_pipe, self.answer_pipe, self._parent_end):
            os.close(pipe)
