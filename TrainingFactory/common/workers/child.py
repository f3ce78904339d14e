"""Answers lines of JSON with what a function makes of them. A script that imports little, to be there at once."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any, BinaryIO

PRIVATE = 40  # the pipes get descriptors from here on, which code does not use by accident


def main() -> None:
    lines, answers = take_pipes()
    ticket, first, _ = json.loads(lines.readline())
    kill_at_hangup(first["life"], os.getpgrp())
    sys.path[:0] = first["path"]
    try:
        module, _, name = first["target"].partition(":")
        function = getattr(import_module(module), name)
        if first["settings"] is not None:
            function = function(first["settings"])
    except Exception as error:
        return send(answers, ticket, None, explain(error))
    send(answers, ticket, None, None)
    for line in lines:
        ticket, message, hears = json.loads(line)
        try:
            tell = [lambda event, ticket=ticket: write(answers, [ticket, event])] if hears else []
            answer, problem = function(message, *tell), None
        except Exception as error:
            answer, problem = None, explain(error)
        send(answers, ticket, answer, problem)


def take_pipes() -> tuple[BinaryIO, int]:
    """Move the pipes to the parent out of reach: what the function prints goes to stderr, not among the answers, and a
    program that it starts reads nothing."""
    lines = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    answers = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return open(lines, "rb"), answers


def kill_at_hangup(pipe: int, group: int) -> None:
    """Let the kernel kill a process group when the writing end of a pipe closes, however its holder ended; a process of
    the group must hold the pipe open. An endless loop would otherwise run on."""
    if sys.platform == "linux":
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -group)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


def send(answers: int, ticket: str, answer: Any, problem: str | None) -> None:
    write(answers, [ticket, answer, problem])


def write(answers: int, message: list[Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(answers, line) :]


def explain(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
