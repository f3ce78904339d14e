"""`PythonTool`: a code interpreter. Every episode has a process of its own, started at its first call."""

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
START_SECONDS = 60.0  # a loaded machine may take its time; usual are a few hundredths
# What the executor grants beyond the interpreter's own limit, which must always strike first: code that never ends
# is the model's doing, an executor's time-out is not.
ALLOWANCE = START_SECONDS + 30.0
BYTES_OF_A_CHAR, BEYOND_OUTPUT = (
    6,
    2**16,
)  # of an answer: a byte may become "\\ufffd"; an error, how it is locked in
HALF_OF_THE_MEMORY = psutil.virtual_memory().total // 2**21  # MiB
NOT_STARTED = (WorkerDied, WorkerError, WorkerTooSlow, OSError)
NO_PROCESS = "the interpreter of the python tool cannot be used: %s"
GONE = "Variables and files are gone; the next call begins with a fresh interpreter."
DESCRIPTION = (
    "Run Python code. Variables are kept between calls. You see what it prints and the value of its last "
    "expression. At most {timeout:g} s a call; no network; files only in the current folder."
)
PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python source"}},
    "required": ["code"],
}


@dataclass(frozen=True, slots=True)
class Isolation:
    """How each thing is enforced on this machine, in words; None: it is not."""

    files: str | None  # nothing outside the working folder, except reading Python and the system's libraries
    network: str | None
    processes: str | None  # none can be started
    signals: str | None  # none can be sent to other processes
    memory: str | None
    disk: str | None
    missing: tuple[str, ...] = ()  # layers that this machine does not offer, with the reason

    @property
    def open_ways(self) -> str:
        """Name what code must be kept from and is not."""
        return " and ".join(what for what in ("files", "network") if getattr(self, what) is None)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound one process."""

    memory_mb: int
    disk_mb: int
    cpu_seconds: int  # of one process, over all its calls
    max_output: int
    threads: bool
    readable: tuple[str, ...]  # folders of packages: on sys.path, to be read


class PythonTool:
    """Runs Python for the model; docs/TOOLS.md says what is isolated.

    `packages` makes the installed packages (numpy, ...) importable: True for those of this environment, or folders;
    `stateful` promises that equal calls give equal answers (no clock, no unseeded chance), so that they may be cached.
    """

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
        self.idle_memory_mb = idle_memory_mb or HALF_OF_THE_MEMORY
        self._idle: weakref.WeakKeyDictionary[PythonSession, int] = weakref.WeakKeyDictionary()  # bytes held
        self.allow_unsafe = allow_unsafe
        readable = _package_folders(name, packages)
        self.limits = Limits(memory_mb, disk_mb, cpu_seconds, max_output_chars, threads, readable)
        self.spec = ToolSpec(name, description or DESCRIPTION.format(timeout=timeout), PARAMETERS)
        # Ordered: calls share variables. Not more processes at work than the machine can serve in time.
        many = concurrency or max(4, 2 * (os.cpu_count() or 1))
        # What is cached is old where another Python, other limits or other packages might answer otherwise.
        version = digest(sys.version, repr(self.limits), f"{timeout:g}")
        self.options = ToolOptions(
            timeout=timeout + ALLOWANCE, ordered=True, stateful=stateful, concurrency=many, version=version
        )
        self.isolation = isolation_here(self.limits)
        if not allow_unsafe and self.isolation.open_ways:
            raise ValueError(
                f"tool {name}: this machine cannot keep code from {self.isolation.open_ways} "
                f"({'; '.join(self.isolation.missing)}). Use Linux 5.13 or later on x86_64 or aarch64, with "
                "Landlock on, or set allow_unsafe=True if the machine holds nothing that model-written code may not "
                "touch"
            )

    def session(self) -> PythonSession:
        return PythonSession(self)

    def rest(self, session: PythonSession, held: int | None) -> None:
        """Note what a session holds between two calls (None: it is none of those now), and stop the largest where all
        together hold too much."""
        self._idle.pop(session, None)
        if held is not None:
            self._idle[session] = held
        while sum(self._idle.values()) > self.idle_memory_mb * 2**20:
            largest = max(self._idle, key=self._idle.__getitem__)
            del self._idle[largest]
            largest.stop(
                f"was stopped, because those of all episodes held over {self.idle_memory_mb} MiB of memory"
            )

    async def open(self) -> None:
        """Do nothing: every session has a process of its own."""

    close = open


class PythonSession:
    """The interpreter of one episode, as a session and as its only tool."""

    def __init__(self, source: PythonTool) -> None:
        self.source = source
        self.spec, self.options = source.spec, source.options
        self._process: _Process | None = None
        self._lost = ""  # why the process is gone, once it is
        self._closed = False
        self._turn = asyncio.Lock()

    @property
    def tools(self) -> Sequence[Tool]:  # no attribute: an object that holds itself is not freed at once
        return [self]

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        async with self._turn:
            self.source.rest(self, None)
            process, note = self._process, ""
            if process is None or not process.alive:
                if process is not None:
                    process.kill()
                    note = f"[a fresh interpreter: the last one {self._lost}; its variables and files are gone]\n"
                try:
                    process = await self._started()
                except NOT_STARTED as error:
                    log.warning(NO_PROCESS, error)
                    return ToolResult(NO_PROCESS % error, ok=False, error="unavailable")
            result = await self._answer(process, arguments["code"], note)
            self.source.rest(self, process.held)
            return result

    async def _started(self) -> _Process:
        if self._closed:
            raise WorkerDied("was closed")
        self._process = process = _Process(self.source.limits)
        isolation = await process.isolation()
        if not self.source.allow_unsafe and isolation.open_ways:
            process.kill()
            raise WorkerDied("has lost its isolation: " + "; ".join(isolation.missing))
        return process

    async def _answer(self, process: _Process, code: str, note: str) -> ToolResult:
        self._lost = "was stopped"  # by whoever cancels this
        try:
            answer = await process.ask({"code": code}, self.source.timeout)
            if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
                raise WorkerDied("was stopped, because code changed what it answers")
        except (WorkerTooSlow, WorkerDied, WorkerError) as error:
            process.kill()
            slow = isinstance(error, WorkerTooSlow)
            self._lost = f"was stopped after {self.source.timeout:g} s" if slow else str(error)
            return ToolResult(f"{note}the interpreter {self._lost}. {GONE}", ok=False, error="exception")
        parts = [answer["text"].rstrip("\n"), str(answer.get("error") or "")]
        text = note + ("\n".join(part for part in parts if part) or "(no output)")
        if answer.get("spent"):
            process.kill()
            self._lost = "ran out of memory"
            text += f"\nAll of its {self.source.limits.memory_mb} MiB of memory are in use. {GONE}"
        failed = bool(answer.get("error"))
        return ToolResult(text, ok=not failed, error="exception" if failed else None)

    def stop(self, why: str) -> None:
        """End the process between two calls."""
        assert self._process is not None
        self._lost = why
        self._process.kill()

    async def close(self) -> None:
        self._closed = True
        self.source.rest(self, None)
        if self._process is not None:
            await self._process.close()


class _Process(Worker):
    """A locked process and its folder; after its end another one is made, with a folder of its own."""

    def __init__(self, limits: Limits) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tf-python-", ignore_cleanup_errors=True)
        folder = self._folder.name
        # An environment of our own making, so nothing secret; a fixed hash seed, so that sets print alike.
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if "LD_LIBRARY_PATH" in os.environ:  # some builds of Python need it to start
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        super().__init__(
            "interpreter:start",
            asdict(limits) | {"folder": folder},
            start_seconds=START_SECONDS,
            path=[str(Path(__file__).parent)],
            flags=["-s", "-S", "-X", "utf8"],
            max_answer=BYTES_OF_A_CHAR * limits.max_output + BEYOND_OUTPUT,
            env=environment,
            cwd=folder,
            stderr=subprocess.DEVNULL,
        )

    @property
    def held(self) -> int:
        """Return the bytes of memory that the process has in use; 0 if it is gone."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).memory_info().rss if self.alive else 0
        return 0

    async def isolation(self) -> Isolation:
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
def isolation_here(limits: Limits) -> Isolation:
    """Return what a process with these limits enforces on this machine, found out by starting one."""

    async def probe() -> Isolation:
        process = _Process(limits)
        try:
            return await process.isolation()
        finally:
            await process.close()

    try:
        return run(probe)
    except NOT_STARTED as error:
        raise ValueError(NO_PROCESS % error) from error


def _package_folders(name: str, packages: bool | str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(packages, bool):
        paths = sysconfig.get_paths()
        return tuple(dict.fromkeys((paths["purelib"], paths["platlib"]))) if packages else ()
    if isinstance(packages, str):
        packages = [packages]
    for folder in packages:
        if not Path(folder).is_dir():
            raise ValueError(f"tool {name}: packages names {folder}, which is not a folder")
    return tuple(str(Path(folder).resolve()) for folder in packages)
