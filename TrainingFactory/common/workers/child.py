"""Script of a worker process: answers each line of JSON by calling a function. Imports little, to start fast."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any, BinaryIO

PRIVATE = 40  # lowest file descriptor for the pipes: user code does not use such high numbers by accident


def main() -> None:
    lines, answers = take_pipes()
    ticket, setup, _ = json.loads(lines.readline())
    kill_at_hangup(setup["life"], os.getpgrp())
    sys.path[:0] = setup["path"]
    try:
        module, _, name = setup["target"].partition(":")
        function = getattr(import_module(module), name)
        if setup["settings"] is not None:
            function = function(setup["settings"])
    except Exception as error:
        return send(answers, ticket, None, explain(error))
    send(answers, ticket, None, None)
    for line in lines:
        ticket, message, wants_events = json.loads(line)
        try:
            report = [lambda event, ticket=ticket: write(answers, [ticket, event])] if wants_events else []
            answer, problem = function(message, *report), None
        except Exception as error:
            answer, problem = None, explain(error)
        send(answers, ticket, answer, problem)


def take_pipes() -> tuple[BinaryIO, int]:
    """Move the request and answer pipes from stdin and stdout to private file descriptors. Text that the called
    function prints then goes to stderr instead of the answers, and its subprocesses have an empty stdin."""
    lines = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    answers = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, PRIVATE)
    null_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_input, 0)
    os.close(null_input)
    os.dup2(2, 1)
    return open(lines, "rb"), answers


def kill_at_hangup(pipe: int, group: int) -> None:
    """Let the kernel kill a process group when the writing end of `pipe` closes, which happens when the parent process
    ends in any way. Otherwise an endless loop in the worker would outlive its parent. A process of the group must hold
    the pipe open. Linux only."""
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
