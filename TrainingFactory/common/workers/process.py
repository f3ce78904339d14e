"""A function in a process of its own, asked over pipes: what never ends there, or brings the process down, is over
after a time limit and harms nobody else."""

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

CHILD = Path(__file__).with_name("child.py")
START_SECONDS = 120.0  # its function may import much
Hear = Callable[[Any], None]
LAST_SECONDS = 1.0  # to leave, for a process that has closed its pipe
MAX_ANSWER_BYTES = 64 * 2**20  # of a function that may be trusted


class WorkerError(Exception):
    """The function raised, or could not be loaded."""


class WorkerDied(Exception):
    """The process is gone without an answer. The text goes on from its name: "died of SIGSEGV"."""


class WorkerTooSlow(Exception):
    """There was no answer in time, and the process was killed."""


class Worker:
    """Starts its process with the first question and again after it has died; asks one question at a time. The process
    ends with `close`, with this object, and with this program. `target` is `package.module:function`, which takes and
    returns JSON; with `settings` it is called with them when the process starts and returns the function that answers.
    """

    def __init__(
        self,
        target: str,
        settings: Any = None,
        *,
        start_seconds: float = START_SECONDS,
        path: Sequence[str] | None = None,  # in front of the process's `sys.path`; None: all of ours
        flags: Sequence[str] = (),  # of Python
        max_answer: int = MAX_ANSWER_BYTES,
        **launch: Any,  # env, cwd, stderr: as subprocess.Popen takes them
    ) -> None:
        self.target, self.settings, self.start_seconds = target, settings, start_seconds
        self._path, self._flags, self._launch, self._max_answer = path, flags, launch, max_answer
        self._child: _Child | None = None
        self._end: Callable[[], Any] = lambda: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    @property
    def alive(self) -> bool:
        return self._child is not None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.process.pid

    async def ask(self, message: Any, seconds: float, hear: Hear | None = None) -> Any:
        """Return the answer; raise WorkerError, or WorkerTooSlow or WorkerDied, after which the process is gone. Who
        hears is told what the function tells on the way, by the function that is its second argument then."""
        if self._loop is not (loop := asyncio.get_running_loop()):  # an object may outlive a run and its loop
            self._loop, self._turn = loop, asyncio.Lock()
        async with self._turn:
            if self._closed:
                raise WorkerDied("was closed")
            if self._child is None:
                self._child = _Child(
                    [sys.executable, "-P", *self._flags, str(CHILD)], self._launch, self._max_answer
                )
                self._end = weakref.finalize(self, self._child.end)
                path = [each or os.getcwd() for each in sys.path] if self._path is None else list(self._path)
                first = {"target": self.target, "settings": self.settings, "path": path}
                try:
                    await self._answer(first | {"life": self._child.life}, self.start_seconds)
                except WorkerTooSlow:
                    raise WorkerDied(f"did not start within {self.start_seconds:g} s") from None
                except WorkerError:
                    self._drop()
                    raise
            return await self._answer(message, seconds, hear)

    async def _answer(self, message: Any, seconds: float, hear: Hear | None = None) -> Any:
        assert self._child is not None
        try:
            async with asyncio.timeout(seconds):
                answer, problem = await self._child.exchange(message, hear)
        except TimeoutError:
            self._drop()
            raise WorkerTooSlow(f"did not answer within {seconds:g} s") from None
        except BaseException:
            self._drop()
            raise
        if problem is not None:
            raise WorkerError(problem)
        return answer

    def _drop(self) -> None:
        self._child = None
        self._end()

    def kill(self) -> None:
        """End the process, and what it has started, at once. A call under way raises WorkerDied."""
        if self._turn.locked() and self._child is not None:
            self._child.signal()  # the call notices, and drops it
        else:
            self._drop()

    async def close(self) -> None:
        """End the process for good."""
        self._closed = True
        if (child := self._child) is not None:
            child.signal()
            try:
                await asyncio.to_thread(child.process.wait)  # the kernel may need a while to free its memory
            finally:
                self.kill()


class _Child:
    """One process and the pipes to it."""

    def __init__(self, command: list[str], launch: Mapping[str, Any], max_answer: int) -> None:
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        self.life, self._alive = os.pipe()  # while our end is open, the process may live
        try:
            self.process = subprocess.Popen(
                command,
                stdin=commands,
                stdout=answers,
                pass_fds=[self.life],
                start_new_session=True,  # so that it can be ended with all that it has started
                **launch,
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            for theirs in (commands, answers, self.life):
                os.close(theirs)
        os.set_blocking(self.commands, False)
        os.set_blocking(self.answers, False)
        self._max_answer = max_answer
        self._rest = b""  # what came after the last answer

    async def exchange(self, message: Any, hear: Hear | None) -> tuple[Any, str | None]:
        """Send the message and return the answer and the problem. The answer carries the ticket of its message: code
        can find the pipe and write to it; one answer too many, and every later one would be that of the call before."""
        ticket = secrets.token_hex(8)
        try:
            await self._send(json.dumps([ticket, message, hear is not None]).encode() + b"\n")
            # before it is parsed, which takes time for foreign data
            while (line := await self._read_line()).startswith(f'["{ticket}", '.encode()):
                match json.loads(line):
                    case [_, answer, problem]:
                        return answer, problem
                    case [_, event] if hear is not None:
                        hear(event)
                    case _:
                        break
        except BrokenPipeError:
            raise WorkerDied(await self._epitaph()) from None
        except (ValueError, RecursionError):  # no JSON
            pass
        raise WorkerDied("was stopped, because code wrote into the pipe for its answers")

    async def _send(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self.commands, rest) :]
            except BlockingIOError:
                await self._ready(self.commands, writing=True)

    async def _read_line(self) -> bytes:
        parts, size = [self._rest], len(self._rest)
        while b"\n" not in parts[-1]:
            await self._ready(self.answers)  # others have their turn, however fast it writes
            parts.append(os.read(self.answers, 65536))
            size += len(parts[-1])
            if not parts[-1]:
                raise BrokenPipeError
            if size > self._max_answer:
                raise WorkerDied(f"was stopped, because it answered with more than {self._max_answer} bytes")
        end, _, self._rest = parts.pop().partition(b"\n")
        return b"".join([*parts, end])

    async def _ready(self, pipe: int, writing: bool = False) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        (loop.add_writer if writing else loop.add_reader)(pipe, ready.set)
        try:
            await ready.wait()
        finally:
            (loop.remove_writer if writing else loop.remove_reader)(pipe)

    async def _epitaph(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, LAST_SECONDS)
        self.signal()
        status = await asyncio.to_thread(self.process.wait)
        if status == -signal.SIGKILL:
            return "was killed"
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def signal(self) -> None:
        """Kill the process and what it has started, also when itself it has ended."""
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that is gone
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.signal()
        self.process.wait()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self.commands, self.answers, self._alive):
            os.close(pipe)
