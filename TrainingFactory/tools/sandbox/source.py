"""`PythonTool`: a code interpreter. Every episode has a process of its own, started at its first call."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.protocols import Tool
from TrainingFactory.tools.cache.history import digest
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.sandbox.process import (
    START_SECONDS,
    Ended,
    InterpreterProcess,
    Isolation,
    Late,
    Limits,
)
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import ToolResult, ToolSpec

log = logging.getLogger(__name__)
MAX_CODE_CHARS = 100_000
# What the executor grants beyond the interpreter's own limit, which must always strike first: code that never ends
# is the model's doing, an executor's time-out is not.
ALLOWANCE = START_SECONDS + 30.0


class PythonTool:
    """Runs Python for the model: variables are kept within an episode, nothing is kept across episodes.

    The process has no network, starts no processes, and sees no files but its own folder and (to read) Python
    and the system's libraries. What this machine enforces is in `isolation`. Where files or network cannot be
    closed off, making the tool fails, unless `allow_unsafe` is set. `packages` makes the installed packages
    (numpy, ...) importable: True for those of this environment, or folders; `threads` allows threads; `stateful`
    promises that equal calls give equal answers (no clock, no unseeded chance), so that they may be cached.
    """

    def __init__(
        self,
        *,
        name: str = "python",
        description: str | None = None,
        timeout: float = 10.0,
        memory_mb: int = 512,
        disk_mb: int = 64,
        cpu_seconds: int = 120,
        max_output_chars: int = 10_000,
        packages: bool | Sequence[str] = False,
        threads: bool = False,
        stateful: bool = False,
        allow_unsafe: bool = False,
        concurrency: int | None = None,
    ) -> None:
        numbers = {"timeout": timeout, "memory_mb": memory_mb, "disk_mb": disk_mb, "cpu_seconds": cpu_seconds}
        for option, value in (numbers | {"max_output_chars": max_output_chars}).items():
            if value <= 0:
                raise ValueError(f"tool {name}: {option} is over 0, not {value}")
        if memory_mb < 64:
            raise ValueError(f"tool {name}: memory_mb is 64 or more, not {memory_mb}: Python itself needs it")
        self.timeout = timeout
        self.allow_unsafe = allow_unsafe
        readable = _package_folders(name, packages)
        self.limits = Limits(memory_mb, disk_mb, cpu_seconds, max_output_chars, threads, readable)
        self.spec = ToolSpec(name, description or _description(timeout), _PARAMETERS)
        # Ordered: calls share variables. Not more processes at work than the machine can serve in time.
        many = concurrency or max(4, 2 * (os.cpu_count() or 1))
        # What is cached is old where another Python, other limits or other packages might answer otherwise.
        version = digest(sys.version, repr(self.limits), f"{timeout:g}")
        self.options = ToolOptions(
            timeout=timeout + ALLOWANCE, ordered=True, stateful=stateful, concurrency=many, version=version
        )
        self.isolation = isolation_here(self.limits)
        if not allow_unsafe:
            _demand(name, self.isolation)
        self._sessions: weakref.WeakSet[PythonSession] = weakref.WeakSet()

    def session(self) -> PythonSession:
        session = PythonSession(self)
        self._sessions.add(session)
        return session

    async def open(self) -> None:
        """Every session starts a process of its own."""

    async def close(self) -> None:
        """End what episodes left open."""
        for session in list(self._sessions):
            session.end()


class PythonSession:
    """The interpreter of one episode, as a session and as its only tool."""

    def __init__(self, source: PythonTool) -> None:
        self.source = source
        self.spec, self.options = source.spec, source.options
        self._process: InterpreterProcess | None = None
        self._lost = ""  # why the previous process is gone
        self._closed = False
        self._one_at_a_time = asyncio.Lock()
        self._turn = threading.Lock()  # the same for threads: one may outlive its cancelled call
        self._lock = threading.Lock()  # of _process and _closed

    @property
    def tools(self) -> Sequence[Tool]:
        return [self]

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        code = arguments["code"]
        if len(code) > MAX_CODE_CHARS:
            text = f"the code has {len(code)} characters, at most {MAX_CODE_CHARS} are allowed"
            return ToolResult(text, ok=False, error="schema")
        async with self._one_at_a_time:
            try:
                return await in_thread(self._in_turn, code)
            except asyncio.CancelledError:
                # The thread is still waiting for an answer; the end of the process wakes it.
                if self._process is not None:
                    self._process.kill()
                    self._lost = self._lost or "was stopped"
                raise

    def _in_turn(self, code: str) -> ToolResult:
        with self._turn:
            return self._run(code)

    def _run(self, code: str) -> ToolResult:
        note = ""
        process = self._process
        if process is None or process.dead:
            if process is not None:
                process.close()
                reason = self._lost or "ended"
                note = f"[a fresh interpreter: the last one {reason}; its variables and files are gone]\n"
            try:
                process = self._started()
            except (Ended, Late, OSError) as error:
                text = f"the interpreter {_reason(error)}"
                log.warning("%s", text)
                return ToolResult(text, ok=False, error="unavailable")
        self._lost = ""
        try:
            answer = process.call(code, self.source.timeout)
        except Late:
            self._lost = f"was stopped after {self.source.timeout:g} s"
            text = f"{note}stopped after {self.source.timeout:g} s. {_GONE}"
            return ToolResult(text, ok=False, error="exception")
        except Ended as error:
            self._lost = str(error)
            return ToolResult(f"{note}the interpreter {error}. {_GONE}", ok=False, error="exception")
        return self._result(note, answer)

    def _result(self, note: str, answer: dict[str, Any]) -> ToolResult:
        parts = [str(answer.get("text") or "").rstrip("\n"), str(answer.get("error") or "")]
        text = note + ("\n".join(part for part in parts if part) or "(no output)")
        if answer.get("spent"):
            self._lost = "ran out of memory"
            text += f"\nAll of its {self.source.limits.memory_mb} MiB of memory are in use. {_GONE}"
        failed = bool(answer.get("error"))
        return ToolResult(text, ok=not failed, error="exception" if failed else None)

    def _started(self) -> InterpreterProcess:
        process = InterpreterProcess(self.source.limits)
        with self._lock:
            if self._closed:
                raise Ended("was closed")
            self._process = process
        isolation = process.start()
        if not self.source.allow_unsafe and not (isolation.files and isolation.network):
            process.close()
            raise Ended("has lost its isolation: " + "; ".join(isolation.missing))
        return process

    def end(self) -> None:
        with self._lock:
            self._closed = True
        if self._process is not None:
            self._process.close()

    async def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._process is not None:
            self._process.kill()  # at once: closing may be cancelled before its thread runs
            await in_thread(self.end)


_GONE = "Variables and files are gone; the next call begins with a fresh interpreter."
_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python source"}},
    "required": ["code"],
}


def _description(timeout: float) -> str:
    return (
        "Run Python code. Variables are kept between calls. You see what it prints and the value of its last "
        f"expression. At most {timeout:g} s a call; no network; files only in the current folder."
    )


@functools.cache
def isolation_here(limits: Limits) -> Isolation:
    """What a process with these limits enforces on this machine, found out by starting one."""
    if os.name != "posix":
        raise ValueError("the python tool needs Linux (or, without isolation, macOS)")
    process = InterpreterProcess(limits)
    try:
        return process.start()
    except (Ended, Late, OSError) as error:
        raise ValueError(f"the interpreter of the python tool {_reason(error)}") from error
    finally:
        process.close()


def _reason(error: Exception) -> str:
    return f"could not be started: {error}" if isinstance(error, OSError) else str(error) or "did not answer"


def _demand(name: str, isolation: Isolation) -> None:
    open_ways = [what for what in ("files", "network") if getattr(isolation, what) is None]
    if open_ways:
        raise ValueError(
            f"tool {name}: this machine cannot keep code from {' and '.join(open_ways)} "
            f"({'; '.join(isolation.missing)}). Use Linux 5.13 or later on x86_64 or aarch64, with Landlock on, "
            "or set allow_unsafe=True if the machine holds nothing that model-written code may not touch"
        )


def _package_folders(name: str, packages: bool | Sequence[str]) -> tuple[str, ...]:
    if isinstance(packages, bool):
        paths = sysconfig.get_paths()
        return tuple(dict.fromkeys((paths["purelib"], paths["platlib"]))) if packages else ()
    if isinstance(packages, str):
        packages = [packages]
    for folder in packages:
        if not Path(folder).is_dir():
            raise ValueError(f"tool {name}: packages names {folder}, which is not a folder")
    return tuple(str(Path(folder).resolve()) for folder in packages)
