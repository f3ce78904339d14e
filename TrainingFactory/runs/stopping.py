"""Stop a run from another process, as by Ctrl-C in its own."""

from __future__ import annotations

import os
import signal

import psutil

from TrainingFactory.runs.folder import RunFolder


def stop(run: RunFolder, asked: set[psutil.Process] | None = None) -> int:
    """Ask the process that writes a run to save a checkpoint and end; return its number. One of those that were `asked`
    is left alone: it would end at once."""
    asked = set() if asked is None else asked
    if run.state != "running":
        raise ValueError(f"run {run.name} is {run.state}, not running")
    lock = str((run.path / "lock").resolve())
    # Whoever only looks whether the lock is held has closed it again.
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _has(process, lock):
            if process not in asked:
                process.send_signal(signal.SIGINT)  # never to another process that has its number
            asked.add(process)
            return process.pid
    raise ValueError(f"run {run.name} is written by a process that this user cannot see")


def _has(process: psutil.Process, path: str) -> bool:
    try:
        return any(each.path == path for each in process.open_files())
    except (psutil.Error, OSError):
        return False
