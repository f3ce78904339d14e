"""The processes that a page starts, forked from one that has torch already: a way through several of them pays for its
import once. What a process does is real: `tfactory train`, or the jobs of `web/worker.py`."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kits.waiting import wait_until
from TrainingFactory.web import pool, processes

HOLD = "hold"  # while its folder has this file, a job waits after what it tells
FORKS = multiprocessing.get_context("forkserver")
NEEDED = (
    "TrainingFactory.cli.train TrainingFactory.trainers.training_run TrainingFactory.evaluation.rollouts "
    "TrainingFactory.learning.policy TrainingFactory.learning.checkpoints TrainingFactory.learning.tree.flex "
    "TrainingFactory.models.tiny TrainingFactory.sampling.native TrainingFactory.tools.mcp_tools "
    "TrainingFactory.web.playing transformers.models.qwen3.modeling_qwen3 peft"
).split()


@contextmanager
def forks() -> Iterator[None]:
    """Have a process to fork from; it starts with the first that is forked."""
    FORKS.set_forkserver_preload([*NEEDED, __name__])
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@contextmanager
def forked_jobs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "Worker", Worker)
        yield


@contextmanager
def forked_runs() -> Iterator[None]:
    given = {"Popen": Command, "DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", SimpleNamespace(**given))
        yield


class Command:
    """What `subprocess.Popen` is to `web/processes.py`."""

    def __init__(self, command: list[str], *, stdout: Any, **_: Any) -> None:
        arguments = command[len(processes.CLI_COMMAND) :]
        self._process = FORKS.Process(target=_run, args=(arguments, stdout.name, os.getcwd()))
        self._process.start()
        self.returncode: int | None = None

    def wait(self) -> None:
        self._process.join()
        self.returncode = self._process.exitcode


def _run(arguments: list[str], log: str, folder: str) -> None:
    os.setsid()
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import_module("TrainingFactory.cli").main(arguments)


class Worker:
    """What `workers.Worker` is to `web/pool.py`."""

    def __init__(self, target: str) -> None:
        self._target, self._turn = target, asyncio.Lock()
        self._process: Any = None

    @property
    def alive(self) -> bool:
        return self._process is not None

    async def ask(self, message: Any, seconds: float, hear: Callable[[Any], None]) -> Any:
        async with self._turn:
            if self._process is None:
                self._pipe, theirs = FORKS.Pipe()
                given = (self._target, theirs, os.getcwd())
                self._process = FORKS.Process(target=_answer, args=given, daemon=True)
                self._process.start()
            self._pipe.send(message)
            try:
                while (told := await asyncio.to_thread(self._pipe.recv))[0] == "told":
                    hear(told[1])
            except BaseException:
                self.kill()
                raise
            return told[1]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    async def close(self) -> None:
        self.kill()


def _answer(target: str, pipe: Any, folder: str) -> None:
    os.chdir(folder)
    module, _, name = target.partition(":")
    function = getattr(import_module(module), name)

    def tell(told: Any) -> None:
        pipe.send(("told", told))
        wait_until(lambda: not os.path.exists(HOLD))

    while True:
        pipe.send(("done", function(pipe.recv(), tell)))
