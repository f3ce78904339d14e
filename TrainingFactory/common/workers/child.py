"""Script of a worker process: answers each line of JSON by calling a function. Imports little, to start fast."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any, BinaryIO

MIN_PIPE_FD = 40  # lowest file descriptor for the pipes: user code uses no such high numbers by accident


def main() -> None:
    requests, answers = take_pipes()
    ticket, setup, _ = json.loads(requests.readline())
    kill_at_hangup(setup["life"], os.getpgrp())
    sys.path[:0] = setup["path"]
    try:
        module, _, function_name = setup["target"].partition(":")
        function = getattr(import_module(module), function_name)
        if setup["settings"] is not None:
            function = function(setup["settings"])
    except Exception as error:
        return send_answer(answers, ticket, None, format_error(error))
    send_answer(answers, ticket, None, None)
    for line in requests:
        ticket, message, wants_events = json.loads(line)
        try:
            callbacks = [lambda event, ticket=ticket: write(answers, [ticket, event])] if wants_events else []
            answer, error_text = function(message, *callbacks), None
        except Exception as error:
            answer, error_text = None, format_error(error)
        send_answer(answers, ticket, answer, error_text)


def take_pipes() -> tuple[BinaryIO, int]:
    """Move the request and answer pipes from stdin and stdout to private file descriptors. Text that the called
    function prints then goes to stderr instead of the answers, and its subprocesses have an empty stdin."""
    request_pipe = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, MIN_PIPE_FD)
    answer_pipe = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, MIN_PIPE_FD)
    null_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_input, 0)
    os.close(null_input)
    os.dup2(2, 1)
    return open(request_pipe, "rb"), answer_pipe


def kill_at_hangup(pipe: int, process_group: int) -> None:
    """Let the kernel kill a process group when the writing end of `pipe` closes, which happens when the parent process
    ends in any way. Otherwise an endless loop in the worker would outlive its parent. A process of the group must hold
    the pipe open. Linux only."""
    if sys.platform == "linux":
        fcntl.fcntl(pipe, fcntl.F_SETOWN, -process_group)
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


def send_answer(answer_pipe: int, ticket: str, answer: Any, error_text: str | None) -> None:
    write(answer_pipe, [ticket, answer, error_text])


def write(answer_pipe: int, message: list[Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(answer_pipe, line) :]


def format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
