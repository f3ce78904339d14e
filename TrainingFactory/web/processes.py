"""Runs as separate processes that outlive the server, started and resumed by the commands that a user would type."""

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
from typing import IO, Any

from TrainingFactory.apps.views.runs import LOG
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.texts import escape_control
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.disk import open_regular_file
from TrainingFactory.runs.folder import RunFolder, is_run, pick_run_name
from TrainingFactory.web.form import with_runs_folder

START_CONFIG = "start.yaml"  # in a run's folder: the config that the form sent
CLI_COMMAND = [sys.executable, "-P", "-m", "TrainingFactory.cli"]  # this installation, regardless of PATH
START_TIMEOUT_SECONDS = 60.0  # seconds to wait for a run to begin, before it is reported as started anyway
NUM_LAST_LINES = 12  # lines of the log in the error of a failed start
_starting_names = set[str]()  # names of runs that have not begun yet
_processes = list[subprocess.Popen[Any]]()


async def train(
    config_text: str, config: TrainingConfig, name: str | None, runs_folder: Path
) -> tuple[str, str]:
    """Start `tfactory train` with a config's YAML and wait until it begins; return the run's name and the command."""
    name = name or pick_run_name(with_runs_folder(config, runs_folder))
    folder, staging = runs_folder / name, runs_folder / f".{name}.part"
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ApiError(f"invalid run name {name!r}: use letters, digits and . _ + - only", "name")
    if folder.exists() or name in _starting_names:
        raise ApiError(f"a run {name} already exists; choose another name", "name", status=409)
    _starting_names.add(name)
    try:
        # A run adopts a folder of this name as its own, so that its log is complete from the first line.
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        (staging / START_CONFIG).write_text(config_text, encoding="utf-8")
        options = [f"logging.output_dir={runs_folder}", "--name", name]
        await _start(["train", str(staging / START_CONFIG), *options], staging / LOG, lambda: is_run(folder))
    except ApiError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        _starting_names.discard(name)
    return name, shlex.join(["tfactory", "train", str(folder / START_CONFIG), *options])


async def resume(run: RunFolder) -> str:
    """Start `tfactory runs resume`; return the command once the run has resumed."""
    if run.state in ("running", "finished"):
        raise ApiError(f"run {run.name} is {run.state}; there is nothing to resume", "name", status=409)
    arguments = ["runs", "resume", run.name, "--runs", str(run.path.parent)]
    await _start(arguments, run.path / LOG, lambda: run.state == "running")
    return shlex.join(["tfactory", *arguments])


async def _start(arguments: list[str], log_file: Path, has_begun: Callable[[], bool]) -> None:
    """Start a command and wait until `has_begun` returns true. If the command exits before, raise ApiError with the end
    of its output."""
    # Keep the file open: it may be deleted together with a run that fails to start.
    with open_regular_file(log_file, "a+b") as log_stream:
        log_size = log_stream.tell()
        process = launch(arguments, log_stream)
        for _ in range(int(START_TIMEOUT_SECONDS / 0.1)):
            if has_begun() or process.returncode is not None:
                break
            await asyncio.sleep(0.1)
        if process.returncode and not has_begun():
            log_stream.seek(log_size)
            last_lines = read_last_lines(log_stream.read())
            error_text = last_lines.partition("error: ")[2]
            raise ApiError(error_text or last_lines or "the process exited at once", code="not_started")


def launch(arguments: list[str], log_stream: IO[Any]) -> subprocess.Popen[Any]:
    """Start a command of this installation in its own session, out of reach of Ctrl-C in the server's terminal."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": log_stream, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([*CLI_COMMAND, *arguments], start_new_session=True, **streams)
    _processes.append(process)
    threading.Thread(target=process.wait, daemon=True).start()  # reaps the process
    return process


def read_last_lines(output: bytes) -> str:
    """Return the last lines of a command's output."""
    text = escape_control(output.decode("utf-8", "replace"))
    return "\n".join(text.split("\n")[-NUM_LAST_LINES:]).strip()


def stop_runs(stopped_pids: Collection[int]) -> int:
    """Stop the runs that this server started; each saves a checkpoint first. Return how many were running. Processes
    with ids in `stopped_pids` are not signalled again, because a second signal would end them without a checkpoint."""
    running_processes = [process for process in _processes if process.poll() is None]
    for process in running_processes:
        if process.pid not in stopped_pids:
            process.terminate()
    for process in running_processes:
        process.wait()
    return len(running_processes)
