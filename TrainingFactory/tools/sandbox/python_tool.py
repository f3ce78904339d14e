"""`PythonTool`, a code interpreter. Every episode has its own process, started at its first call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import subprocess
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field, validate_call

from TrainingFactory.common.event_loop import run
from TrainingFactory.common.options import STRICT, Count, Positive
from TrainingFactory.common.workers import Worker, WorkerDied, WorkerError, WorkerTooSlow
from TrainingFactory.protocols import Tool
from TrainingFactory.tools.fingerprint import digest
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import ToolResult, ToolSpec

log = logging.getLogger(__name__)
START_SECONDS = 60.0  # usually a few hundredths of a second; long, for loaded machines
# The executor's time-out exceeds the interpreter's by this, so that the interpreter's comes first: endless code is an
# error of the model, a time-out of the executor is not.
EXTRA_TIMEOUT_SECONDS = START_SECONDS + 30.0
BYTES_PER_CHAR = 6  # in an answer: a byte may become "\\ufffd"
EXTRA_ANSWER_BYTES = 2**16  # bytes of an answer for the error and the isolation report
HALF_OF_MEMORY_MB = psutil.virtual_memory().total // 2**21  # MiB
START_ERRORS = (WorkerDied, WorkerError, WorkerTooSlow, OSError)
START_FAILED_TEXT = "cannot start the interpreter of the python tool: %s"
STATE_LOST_TEXT = "Variables and files are gone; the next call begins with a fresh interpreter."
TOOL_DESCRIPTION = (
    "Run Python code. Variables are kept between calls. You see what it prints and the value of its last "
    "expression. At most {timeout:g} s a call; no network; files only in the current folder."
)
CODE_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python source"}},
    "required": ["code"],
}


@dataclass(frozen=True, slots=True)
class Isolation:
    """The mechanism that enforces each restriction on this machine; None: not enforced."""

    files: str | None  # no access outside the working folder, except reading Python and the system libraries
    network: str | None
    processes: str | None  # code cannot start any
    signals: str | None  # code cannot send any to other processes
    memory: str | None
    disk: str | None
    missing: tuple[str, ...] = ()  # layers that this machine lacks, with the reason

    @property
    def unenforced(self) -> str:
        """Return the required restrictions that are not enforced: "files", "network", both, or an empty text."""
        return " and ".join(name for name in ("files", "network") if getattr(self, name) is None)


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of one interpreter process."""

    memory_mb: int
    disk_mb: int
    cpu_seconds: int  # over all calls of the process
    max_output: int
    threads: bool
    readable: tuple[str, ...]  # package folders: added to sys.path, read-only


class PythonTool:
    """Runs Python code of the model in a sandbox; docs/TOOLS.md describes the isolation. `packages` makes installed
    packages (numpy, ...) importable: True for those of this environment, or folders. `stateful` promises that equal
    calls give equal results (no clock, no unseeded randomness), so they may be cached."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        *,
        name: str = "python",
        description: str | None = None,
        timeout: Positive = 10.0,
        memory_mb: Annotated[int, Field(ge=64)] = 512,  # Python itself needs 64
        disk_mb: Count = 64,
        cpu_seconds: Count = 120,
        max_output_chars: Count = 10_000,
        packages: bool | str | Sequence[str] = False,
        threads: bool = False,
        stateful: bool = False,
        allow_unsafe: bool = False,
        concurrency: Count | None = None,
        idle_memory_mb: Count | None = None,
    ) -> None:
        self.timeout = timeout
        self.idle_memory_mb = idle_memory_mb or HALF_OF_MEMORY_MB
        self._idle_memory_bytes: weakref.WeakKeyDictionary[PythonSession, int] = weakref.WeakKeyDictionary()
        self.allow_unsafe = allow_unsafe
        folders = _find_package_folders(name, packages)
        self.limits = ProcessLimits(memory_mb, disk_mb, cpu_seconds, max_output_chars, threads, folders)
        self.spec = ToolSpec(name, description or TOOL_DESCRIPTION.format(timeout=timeout), CODE_PARAMETERS)
        # The default runs no more processes than the machine can serve in time.
        max_processes = concurrency or max(4, 2 * (os.cpu_count() or 1))
        # Results depend on the Python version, the limits and the packages.
        version = digest(sys.version, repr(self.limits), f"{timeout:g}")
        self.options = ToolOptions(  # ordered, because calls share variables
            timeout=timeout + EXTRA_TIMEOUT_SECONDS,
            ordered=True,
            stateful=stateful,
            concurrency=max_processes,
            version=version,
        )
        self.isolation = probe_isolation(self.limits)
        if not allow_unsafe and self.isolation.unenforced:
            raise ValueError(
                f"tool {name}: this machine cannot isolate code from {self.isolation.unenforced} "
                f"({'; '.join(self.isolation.missing)}). Use Linux 5.13 or later on x86_64 or aarch64 with Landlock "
                "enabled, or set allow_unsafe=True if model-written code may access everything on this machine"
            )

    def session(self) -> PythonSession:
        return PythonSession(self)

    def set_idle_memory(self, session: PythonSession, memory_bytes: int | None) -> None:
        """Record the memory of an idle session in bytes (None: it is not idle). While all idle sessions together exceed
        `idle_memory_mb`, stop the largest one."""
        self._idle_memory_bytes.pop(session, None)
        if memory_bytes is not None:
            self._idle_memory_bytes[session] = memory_bytes
        while sum(self._idle_memory_bytes.values()) > self.idle_memory_mb * 2**20:
            largest_session = max(self._idle_memory_bytes, key=self._idle_memory_bytes.__getitem__)
            del self._idle_memory_bytes[largest_session]
            reason = f"the idle interpreters of all episodes used over {self.idle_memory_mb} MiB of memory"
            largest_session.stop(f"was stopped, because {reason}")

    async def open(self) -> None:
        """Do nothing: every session starts its own process."""

    close = open


class PythonSession:
    """One episode's interpreter, as a session and as its only tool."""

    def __init__(self, source: PythonTool) -> None:
        self.source = source
        self.spec, self.options = source.spec, source.options
        self._process: _InterpreterProcess | None = None
        self._end_reason = ""  # why the process ended
        self._is_closed = False
        self._lock = asyncio.Lock()

    @property
    def tools(self) -> Sequence[Tool]:  # a property, because an attribute would be a reference cycle
        return [self]

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        async with self._lock:
            self.source.set_idle_memory(self, None)
            process, note = self._process, ""
            if process is None or not process.alive:
                if process is not None:
                    process.kill()
                    reason = self._end_reason
                    note = f"[a fresh interpreter: the last one {reason}; its variables and files are gone]\n"
                try:
                    process = await self._start_process()
                except START_ERRORS as error:
                    log.warning(START_FAILED_TEXT, error)
                    return ToolResult(START_FAILED_TEXT % error, ok=False, error="unavailable")
            result = await self._run_code(process, arguments["code"], note)
            self.source.set_idle_memory(self, process.memory_bytes)
            return result

    async def _start_process(self) -> _InterpreterProcess:
        if self._is_closed:
            raise WorkerDied("was closed")
        self._process = process = _InterpreterProcess(self.source.limits)
        isolation = await process.fetch_isolation()
        if not self.source.allow_unsafe and isolation.unenforced:
            process.kill()
            raise WorkerDied("has lost its isolation: " + "; ".join(isolation.missing))
        return process

    async def _run_code(self, process: _InterpreterProcess, code: str, note: str) -> ToolResult:
        self._end_reason = "was stopped"  # if this call is cancelled
        try:
            answer = await process.ask({"code": code}, self.source.timeout)
            if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
                raise WorkerDied("was stopped, because the code tampered with its answers")
        except (WorkerTooSlow, WorkerDied, WorkerError) as error:
            process.kill()
            is_timeout = isinstance(error, WorkerTooSlow)
            self._end_reason = f"was stopped after {self.source.timeout:g} s" if is_timeout else str(error)
            text = f"{note}the interpreter {self._end_reason}. {STATE_LOST_TEXT}"
            return ToolResult(text, ok=False, error="exception")
        outputs = [answer["text"].rstrip("\n"), str(answer.get("error") or "")]
        text = note + ("\n".join(output for output in outputs if output) or "(no output)")
        if answer.get("spent"):
            process.kill()
            self._end_reason = "ran out of memory"
            text += f"\nAll of its {self.source.limits.memory_mb} MiB of memory are in use. {STATE_LOST_TEXT}"
        has_failed = bool(answer.get("error"))
        return ToolResult(text, ok=not has_failed, error="exception" if has_failed else None)

    def stop(self, reason: str) -> None:
        """Kill the idle process; `reason` is shown to the model at the next call."""
        assert self._process is not None
        self._end_reason = reason
        self._process.kill()

    async def close(self) -> None:
        self._is_closed = True
        self.source.set_idle_memory(self, None)
        if self._process is not None:
            await self._process.close()


class _InterpreterProcess(Worker):
    """A sandboxed interpreter process and its working folder. Not restartable."""

    def __init__(self, limits: ProcessLimits) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tf-python-", ignore_cleanup_errors=True)
        folder = self._folder.name
        # Built from scratch, so that it holds no secrets. The fixed hash seed makes sets print in the same order.
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if "LD_LIBRARY_PATH" in os.environ:  # some builds of Python need it to start
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        super().__init__(
            "interpreter:start",
            asdict(limits) | {"folder": folder},
            start_seconds=START_SECONDS,
            sys_path=[str(Path(__file__).parent)],
            flags=["-s", "-S", "-X", "utf8"],
            max_bytes=BYTES_PER_CHAR * limits.max_output + EXTRA_ANSWER_BYTES,
            env=environment,
            cwd=folder,
            stderr=subprocess.DEVNULL,
        )

    @property
    def memory_bytes(self) -> int:
        """Return the resident memory of the process in bytes; 0 if it has ended."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).memory_info().rss if self.alive else 0
        return 0

    async def fetch_isolation(self) -> Isolation:
        report = await self.ask({}, START_SECONDS)
        return Isolation(**(report | {"missing": tuple(report["missing"])}))

    def kill(self) -> None:
        super().kill()
        self._folder.cleanup()

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            self._folder.cleanup()


@functools.cache
def probe_isolation(limits: ProcessLimits) -> Isolation:
    """Start a process with these limits and return the isolation that this machine enforces."""

    async def probe() -> Isolation:
        process = _InterpreterProcess(limits)
        try:
            return await process.fetch_isolation()
        finally:
            await process.close()

    try:
        return run(probe)
    except START_ERRORS as error:
        raise ValueError(START_FAILED_TEXT % error) from error


def _find_package_folders(name: str, packages: bool | str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(packages, bool):
        paths = sysconfig.get_paths()
        return tuple(dict.fromkeys((paths["purelib"], paths["platlib"]))) if packages else ()
    if isinstance(packages, str):
        packages = [packages]
    for folder in packages:
        if not Path(folder).is_dir():
            raise ValueError(f"tool {name}: packages: {folder} is not a folder; set an existing one")
    return tuple(str(Path(folder).resolve()) for folder in packages)
