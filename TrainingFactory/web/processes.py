"""Runs as processes of their own, which outlive the page: started and resumed as by the commands that a user
would type."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from TrainingFactory.apps.views.runs import LOG
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.texts import clean
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.disk import open_regular
from TrainingFactory.runs.folder import RunFolder, is_run, new_name
from TrainingFactory.web.form import placed

START = "start.yaml"  # in a run's folder: what the form has sent
# this very installation, whatever the PATH says
COMMAND = [sys.executable, "-P", "-m", "TrainingFactory.cli"]
WAIT = 60.0  # seconds for a run to begin; after that it is only told that it has been started
LAST_LINES = 12  # of the log, where it came to nothing
_starting = set[str]()  # names of runs that have not begun yet
_processes = list[subprocess.Popen[Any]]()


async def train(text: str, config: TrainingConfig, name: str | None, runs: Path) -> tuple[str, str]:
    """Start `tfactory train` with the text of a config; return the run's name and the command when it has begun."""
    name = name or new_name(placed(config, runs))
    path, part = runs / name, runs / f".{name}.part"
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ApiError(f"{name!r} cannot name a run: letters, digits and . _ + - only", "name")
    if path.exists() or name in _starting:
        raise ApiError(f"there is a run {name} already; choose another name", "name", status=409)
    _starting.add(name)
    try:
        # A run uses up a folder of this name when it makes its own, and so has its log from the first line.
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        (part / START).write_text(text, encoding="utf-8")
        options = [f"logging.output_dir={runs}", "--name", name]
        await _begun(["train", str(part / START), *options], part / LOG, lambda: is_run(path))
    except ApiError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    finally:
        _starting.discard(name)
    return name, shlex.join(["tfactory", "train", str(path / START), *options])


async def resume(run: RunFolder) -> str:
    """Start `tfactory runs resume`; return the command when the run goes on."""
    if run.state in ("running", "finished"):
        raise ApiError(f"run {run.name} is {run.state}; there is nothing to resume", "name", status=409)
    arguments = ["runs", "resume", run.name, "--runs", str(run.path.parent)]
    await _begun(arguments, run.path / LOG, lambda: run.state == "running")
    return shlex.join(["tfactory", *arguments])


async def _begun(arguments: list[str], log: Path, begun: Callable[[], bool]) -> None:
    """Start a command and wait until it has begun; raise ApiError with its own words where it ends before."""
    # The file may be removed with a run that comes to nothing.
    with open_regular(log, "a+b") as output:
        before = output.tell()
        places = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        # In a session of its own: Ctrl-C in the page's terminal is not for it.
        process = subprocess.Popen([*COMMAND, *arguments], start_new_session=True, **places)
        _processes.append(process)
        threading.Thread(target=process.wait, daemon=True).start()  # no zombie stays behind
        for _ in range(int(WAIT / 0.1)):
            if begun() or process.returncode is not None:
                break
            await asyncio.sleep(0.1)
        if process.returncode and not begun():
            output.seek(before)
            said = clean(output.read().decode("utf-8", "replace"))
            told = "\n".join(said.split("\n")[-LAST_LINES:]).strip()
            raise ApiError(told.partition("error: ")[2] or told or "it ended at once", code="not_started")


def stop_runs(stopping: Collection[int]) -> int:
    """Let the runs that the page started save their checkpoints and end; return how many were running. Those with the
    process numbers `stopping` have had their signal: a second one would end them without a checkpoint."""
    running = [process for process in _processes if process.poll() is None]
    for process in running:
        if process.pid not in stopping:
            process.terminate()
    for process in running:
        process.wait()
    return len(running)
