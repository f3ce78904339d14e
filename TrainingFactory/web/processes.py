"""Runs as processes of their own, which outlive the page: started, stopped and resumed by the commands that a user
would type."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from TrainingFactory.config import TrainingConfig
from TrainingFactory.http.api import ApiError
from TrainingFactory.services.runs.folder import RunFolder, is_run, new_name
from TrainingFactory.services.views.runs import LOG
from TrainingFactory.texts import clean

START = "start.yaml"  # what the form has sent
COMMAND = [
    sys.executable,
    "-P",
    "-m",
    "TrainingFactory.cli",
]  # this very installation, whatever the PATH says
WAIT = 60.0  # seconds for a run to have its folder; after that it is only told that it has been started
LAST_LINES = 12  # of the log, where it came to nothing


class Processes:
    """Holds what this page has started, so that nothing of it stays behind as a zombie; a run needs it for nothing."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self._started: list[subprocess.Popen[bytes]] = []

    async def train(self, text: str, config: TrainingConfig, name: str | None) -> tuple[str, str]:
        """Start `tfactory train` with the text of a config; return the run's name and the command when its folder is
        there. Raise ApiError with the command's own words if it has ended before."""
        placed = config.logging.model_copy(update={"output_dir": str(self.runs)})
        name = name or new_name(config.model_copy(update={"logging": placed}))
        if Path(name).name != name or name.startswith("."):
            raise ApiError(
                f"{name!r} cannot name a run: it is the name of a folder, such as search-1", "name"
            )
        path = self.runs / name
        if path.exists():
            raise ApiError(f"there is a run {name} already; choose another name", "name", status=409)
        # The run uses up the folder of this name when it makes its own, and so has its log from the first line.
        part = self.runs / f".{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / START).write_text(text, encoding="utf-8")
        where = f"logging.output_dir={self.runs}"
        process = self._start(["train", str(part / START), where, "--name", name], part / LOG)
        with (part / LOG).open("rb") as log:  # the file may be removed with a run that comes to nothing
            end = time.monotonic() + WAIT
            while not is_run(path) and process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(0.1)
            if process.poll() not in (None, 0) and not is_run(path):
                shutil.rmtree(part, ignore_errors=True)
                raise ApiError(_last_words(log.read()), code="not_started")
        return name, shlex.join(["tfactory", "train", str(path / START), where, "--name", name])

    async def resume(self, run: RunFolder) -> str:
        """Start `tfactory runs resume`; return the command when the run goes on."""
        if run.state in ("running", "finished"):
            raise ApiError(f"run {run.name} is {run.state}; there is nothing to resume", "name", status=409)
        log = run.path / LOG
        seen = log.stat().st_size if log.is_file() else 0
        arguments = ["runs", "resume", run.name, "--runs", str(self.runs)]
        process = self._start(arguments, log)
        end = time.monotonic() + WAIT
        while run.state != "running" and process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.1)
        if process.poll() not in (None, 0):
            raise ApiError(_last_words(log.read_bytes()[seen:]), code="not_started")
        return shlex.join(["tfactory", *arguments])

    def stop(self, run: RunFolder) -> str:
        """Ask the process that writes the run to stop as by Ctrl-C, which saves a checkpoint; return the command."""
        if run.state != "running":
            raise ApiError(f"run {run.name} is {run.state}, not running", "name", status=409)
        if (holder := _holder(run.path / "lock")) is None:
            text = f"run {run.name} is written by a process that this user cannot see; stop it where it was started"
            raise ApiError(text, "name", status=409)
        holder.send_signal(signal.SIGINT)  # psutil sends none to another process that has its number by now
        return f"kill -INT {holder.pid}"

    def reap(self) -> None:
        """Let those go that have ended."""
        self._started = [process for process in self._started if process.poll() is None]

    def _start(self, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
        self.reap()
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the page's terminal is not for it
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        self._started.append(process)
        return process


def _holder(lock: Path) -> psutil.Process | None:
    """Return the process that holds the run's lock: whoever only looks whether it is held has closed it again."""
    wanted = str(lock.resolve())
    for _ in range(3):
        found = [process for process in psutil.process_iter() if _has_open(process, wanted)]
        found = [process for process in found if process.pid != os.getpid()]
        if len(found) == 1:
            return found[0]
        time.sleep(0.05)
    return found[0] if found else None


def _has_open(process: psutil.Process, path: str) -> bool:
    try:
        return any(each.path == path for each in process.open_files())
    except (psutil.Error, OSError):
        return False


def _last_words(log: bytes) -> str:
    """Return what the command said last."""
    lines = [line for line in clean(log.decode("utf-8", "replace")).splitlines() if line.strip()]
    told = "\n".join(lines[-LAST_LINES:])
    return told.partition("error: ")[2] or told or "the run ended without a word"
