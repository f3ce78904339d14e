"""Process groups of foreign programs: environment variables without secrets, signals, and the end of their stderr."""

from __future__ import annotations

import contextlib
import os

import psutil

# Environment variables that foreign programs inherit: enough to start, and no secrets.
INHERITED_VARIABLES = "HOME LANG LC_ALL LD_LIBRARY_PATH LOGNAME PATH SHELL TERM TMPDIR TZ USER".split()
MAX_STDERR_BYTES, MAX_LINES, MAX_LINE_CHARS = 8000, 5, 500  # of stderr


def inherit_variables(extra_names: list[str]) -> dict[str, str]:
    """Return the variables in `INHERITED_VARIABLES` and `extra_names` that are set."""
    return {name: os.environ[name] for name in (*INHERITED_VARIABLES, *extra_names) if name in os.environ}


def find_offspring(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def signal_group(process_group: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process_group, signal_number)


def quote_stderr(stderr: bytes) -> str:
    """Return the last lines of stderr for an error message; empty if there are none."""
    lines = [line.rstrip()[:MAX_LINE_CHARS] for line in stderr.decode(errors="replace").split("\n")]
    last_lines = [line for line in lines if line][-MAX_LINES:]
    return "; its stderr:\n  " + "\n  ".join(last_lines) if last_lines else ""
