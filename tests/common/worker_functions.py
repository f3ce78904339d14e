"""What the tests of workers ask in a process."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any


def double(message: Any) -> Any:
    print("not an answer")
    return message * 2


def pid(message: Any) -> int:
    return os.getpid()


def adding(settings: int) -> Callable[[int], int]:
    return lambda message: message + settings


def do(message: Any) -> Any:
    """What the message says, and nothing good."""
    if message == "raise":
        raise KeyError("text")
    if message == "exit":
        os._exit(3)
    if message == "abort":
        os.abort()
    if message == "read":
        return subprocess.run(["cat"], capture_output=True, check=False).stdout.decode()
    if message == "start":
        return subprocess.Popen(["sleep", "1000"]).pid
    if message == "sleep":
        time.sleep(1000)
    return os.getpid()


def broken(settings: Any) -> Any:
    raise ValueError("no such thing")
