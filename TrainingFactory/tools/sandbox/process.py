"""One interpreter process, seen from the trainer. Everything here blocks and belongs on a thread, except `kill`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 60.0  # a loaded machine may take its time; the usual figure is a few hundredths
MAX_ANSWER_BYTES = 64 * 2**20


class Ended(Exception):
    """The process is gone; the text goes on from "the interpreter"."""


class Late(Exception):
    """No answer in time; the process has been killed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Isolation:
    """How each thing is enforced on this machine, in words; None: it is not."""

    files: str | None  # nothing outside the working folder, except reading Python and the system's libraries
    network: str | None
    processes: str | None  # none can be started
    signals: str | None  # none can be sent to other processes
    memory: str | None
    disk: str | None
    missing: tuple[str, ...] = ()  # layers that this machine does not offer, with the reason


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    memory_mb: int = 512
    disk_mb: int = 64
    cpu_seconds: int = 120  # of one process, over all its calls
    max_output: int = 10_000
    threads: bool = False
    readable: tuple[str, ...] = ()  # folders of packages: on sys.path, to be read


class InterpreterProcess:
    """Started by the first `call`; dead after `kill`, after a time-out and after the code ended it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.isolation: Isolation | None = None
        self.dead = False
        self._process: subprocess.Popen[bytes] | None = None
        self._life = -1  # while this end of a pipe is open, the process lives
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._in_use = threading.Lock()  # held while the pipes are: they are closed after the last reader

    def start(self) -> Isolation:
        with self._in_use:
            return self._start()

    def _start(self) -> Isolation:
        life, self._life = os.pipe()
        try:
            with self._lock:
                if self.dead:
                    raise Ended("was closed")
                self._folder = tempfile.TemporaryDirectory(prefix="tf-python-", ignore_cleanup_errors=True)
                self._process = self._spawn(self._folder.name, life)
        finally:
            os.close(life)
        settings = dataclasses.asdict(self.limits) | {"folder": self._folder.name, "life": life}
        hello = self._exchange(settings, START_SECONDS)
        if "isolation" not in hello:
            self.kill()
            raise Ended(f"could not be locked in: {hello.get('failed', hello)}")
        report = hello["isolation"]
        self.isolation = Isolation(**(report | {"missing": tuple(report["missing"])}))
        return self.isolation

    def _spawn(self, folder: str, life: int) -> subprocess.Popen[bytes]:
        # An environment of our own making, so nothing secret; a fixed hash seed, so that sets print alike.
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if "LD_LIBRARY_PATH" in os.environ:  # some builds of Python need it to start
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        return subprocess.Popen(
            [sys.executable, "-s", "-S", "-X", "utf8", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=folder,
            env=environment,
            start_new_session=True,
            pass_fds=(life,),
        )

    def call(self, code: str, timeout: float) -> dict[str, Any]:
        """What the worker answered: `text`, `error`, `spent`."""
        with self._in_use:
            if self.dead:
                raise Ended("was closed")
            answer = self._exchange({"code": code}, timeout)
        if not isinstance(answer.get("text"), str) or answer.get("spent", True):
            self.kill()
        return answer

    def _exchange(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer carries the ticket of its message. Code can find the private pipe and write to it; one answer
        too many, and every later one would be that of the call before."""
        process, deadline = self._process, time.monotonic() + timeout
        assert process is not None and process.stdin is not None and process.stdout is not None
        commands, answers, ticket = process.stdin.fileno(), process.stdout.fileno(), secrets.token_hex(8)
        line = memoryview(json.dumps(message | {"ticket": ticket}).encode() + b"\n")
        try:
            in_step = self._silent(answers)
            while line and in_step:
                self._wait(commands, select.POLLOUT, deadline)
                line = line[os.write(commands, line[: select.PIPE_BUF]) :]
            answer = json.loads(self._read_line(answers, deadline)) if in_step else None
            if isinstance(answer, dict) and answer.get("ticket") == ticket and self._silent(answers):
                return answer
        except BrokenPipeError:
            raise Ended(self._epitaph()) from None
        except (ValueError, RecursionError):  # no JSON
            pass
        except BaseException:
            self.kill()
            raise
        self.kill()
        raise Ended("was stopped, because code wrote into the pipe for its answers")

    def _silent(self, answers: int) -> bool:
        """Whether nothing has come that is not asked for."""
        ready = select.poll()
        ready.register(answers, select.POLLIN)
        return not self._buffer and not any(event & select.POLLIN for _, event in ready.poll(0))

    def _read_line(self, source: int, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            self._wait(source, select.POLLIN, deadline)
            data = os.read(source, 65536)
            if not data or len(self._buffer) > MAX_ANSWER_BYTES:
                raise BrokenPipeError
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        ready = select.poll()
        ready.register(descriptor, event)
        if not ready.poll(max(deadline - time.monotonic(), 0) * 1000):
            self.kill()
            raise Late

    def _epitaph(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.kill()
        status = self._process.wait()
        if status == -signal.SIGKILL:
            return "was killed"
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def kill(self) -> None:
        """At once, from any thread; whoever waits for an answer gets `Ended`."""
        with self._lock:
            self.dead = True
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill, and leave nothing behind: no process, no pipe, no folder."""
        self.kill()  # which wakes whoever waits for an answer
        with self._in_use:
            if self._process is not None:
                self._process.wait()
                for pipe in (self._process.stdin, self._process.stdout):
                    if pipe is not None:
                        pipe.close()
            if self._life >= 0:
                os.close(self._life)
                self._life = -1
            if self._folder is not None:
                self._folder.cleanup()
