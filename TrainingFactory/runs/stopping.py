"""Stopping a run that another process trains."""

from __future__ import annotations

import os
import signal

import psutil

from TrainingFactory.runs.folder import RunFolder


def stop_run(run: RunFolder, signalled_processes: set[psutil.Process] | None = None) -> int:
    """Send SIGINT to the process that trains the run, so that it saves a checkpoint and exits; return its process id.
    Add the process to `signalled_processes`. Send nothing to a process that is already in it, because a second SIGINT
    aborts the run."""
    signalled_processes = set() if signalled_processes is None else signalled_processes
    if run.state != "running":
        raise ValueError(f"run {run.name} is {run.state}, not running")
    lock_file = str((run.path / "lock").resolve())
    # Only the training process keeps the lock file open; a process that checks the lock closes the file at once.
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _has_open_file(process, lock_file):
            if process not in signalled_processes:
                process.send_signal(signal.SIGINT)  # psutil checks that the process id was not reused
            signalled_processes.add(process)
            return process.pid
    raise ValueError(f"cannot see the process that trains run {run.name}. Stop it as the user who started it")


def _has_open_file(process: psutil.Process, path: str) -> bool:
    try:
        return any(file.path == path for file in process.open_files())
    except (psutil.Error, OSError):
        return False
