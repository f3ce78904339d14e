"""End a process with what it has started."""

from __future__ import annotations

import contextlib
import os

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def signal_group(group: int, number: int) -> None:
    with contextlib.suppress(
        ProcessLookupError, PermissionError
    ):  # macOS says the latter of a group that is gone
        os.killpg(group, number)


def kill_all(found: list[psutil.Process]) -> None:
    """Kill those that are still there: not one that merely has the number of one."""
    for each in found:
        with contextlib.suppress(psutil.Error):
            each.kill()
