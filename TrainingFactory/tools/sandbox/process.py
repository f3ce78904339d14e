"""One interpreter, seen from the trainer: a locked process and its folder."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from TrainingFactory.workers import Worker, WorkerDied

START_SECONDS = 60.0  # a loaded machine may take its time; usual are a few hundredths


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

    @property
    def open_ways(self) -> str:
        """Name what code must be kept from and is not."""
        return " and ".join(what for what in ("files", "network") if getattr(self, what) is None)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    memory_mb: int
    disk_mb: int
    cpu_seconds: int  # of one process, over all its calls
    max_output: int
    threads: bool
    readable: tuple[str, ...]  # folders of packages: on sys.path, to be read


class SandboxProcess:
    """Live until `kill`, a time-out, or the end that the code makes of it; never started again."""

    def __init__(self, limits: Limits) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tf-python-", ignore_cleanup_errors=True)
        folder = self._folder.name
        # An environment of our own making, so nothing secret; a fixed hash seed, so that sets print alike.
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        if "LD_LIBRARY_PATH" in os.environ:  # some builds of Python need it to start
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        self._worker = Worker(
            "interpreter:start",
            dataclasses.asdict(limits) | {"folder": folder},
            start_seconds=START_SECONDS,
            path=[str(Path(__file__).parent)],
            flags=["-s", "-S", "-X", "utf8"],
            env=environment,
            cwd=folder,
            stderr=subprocess.DEVNULL,
        )

    @property
    def alive(self) -> bool:
        return self._worker.alive

    async def start(self) -> Isolation:
        report = await self._worker.ask({}, START_SECONDS)
        return Isolation(**(report | {"missing": tuple(report["missing"])}))

    async def run(self, code: str, seconds: float) -> dict[str, Any]:
        """Return `text`, `error` and `spent`: what was printed, what was raised, whether the memory is used up, which
        ends the process."""
        answer = await self._worker.ask({"code": code}, seconds)
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
            self.kill()
            raise WorkerDied("was stopped, because code changed what it answers")
        if answer.get("spent"):
            self.kill()
        return answer

    def kill(self) -> None:
        self._worker.kill()
        self._folder.cleanup()

    async def close(self) -> None:
        """Leave nothing behind: no process, no pipe, no folder."""
        try:
            await self._worker.close()
        finally:
            self._folder.cleanup()
