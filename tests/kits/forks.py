"""Processes of tests that one server forks, which has imported what takes seconds: they begin at once. `python` in
`tests/kits/cli.py` starts one as a shell does."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

FORKED = pytest.mark.xdist_group("forks")  # they share one process of the suite, and so one server
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = [
    "tests.kits.run",
    "tests.kits.sharded",
    "TrainingFactory.cli.app",
    "TrainingFactory.learning.checkpoints",
    "TrainingFactory.sampling",
    "TrainingFactory.models.loading",
    "TrainingFactory.apps.serving.server",
    "peft",
]


def fork(target: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Start a process that calls this function."""
    FORKS.set_forkserver_preload(PRELOADED)  # the same for all tests: only the first start reads it
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    return process


class Command:
    """`tfactory` with these arguments in that folder, with its output in two files there."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._files = [folder / "stdout", folder / "stderr"]
        # The same bits are promised for the same number of threads.
        threads = torch.get_num_threads()
        self.process = fork(_command, folder, dict(os.environ), threads, self._files, arguments)

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def line(self) -> str:
        """The first line that it prints, waited for."""
        while self.running and "\n" not in self.texts()[0]:
            time.sleep(0.01)
        return self.texts()[0].partition("\n")[0]

    def texts(self) -> tuple[str, str]:
        """What it has printed up to now, on stdout and stderr."""
        out, err = (file.read_text(encoding="utf-8") if file.exists() else "" for file in self._files)
        return out, err

    def end(self, seconds: float) -> tuple[int | None, str, str]:
        """Its status, stdout and stderr; whoever has not ended by then is killed."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        return self.process.exitcode, *self.texts()


def _command(
    folder: Path, environment: dict[str, str], threads: int, files: list[Path], arguments: tuple[str, ...]
) -> None:
    from TrainingFactory.cli import main

    torch.set_num_threads(threads)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment
    for stream, file in zip((sys.stdout, sys.stderr), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    main(list(arguments))
