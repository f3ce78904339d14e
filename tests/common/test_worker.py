"""One function in a process: answers, limits, and how a process ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.mcp import children
from tests.kits.waiting import wait_until
from TrainingFactory.common.workers import Worker, WorkerDied, WorkerError, WorkerTooSlow

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = "tests.common.worker_functions"
SECONDS = 60  # only a hang takes so long


def play(use: Callable[[Worker], Awaitable[Any]], name: str = "do", settings: Any = None) -> Any:
    """What `use` makes of a worker, which is closed after it."""
    processes, files = children(), len(os.listdir("/dev/fd"))

    async def run() -> Any:
        worker = Worker(f"{FUNCTIONS}:{name}", settings)
        try:
            return await use(worker)
        finally:
            await worker.close()
            assert not worker.alive
            with pytest.raises(WorkerDied, match="was closed"):
                await worker.ask(1, SECONDS)

    found = asyncio.run(run())
    assert children() <= processes and len(os.listdir("/dev/fd")) <= files
    return found


def test_answers():
    async def use(worker: Worker) -> Any:
        return await asyncio.gather(*(worker.ask(each, SECONDS) for each in (1, "a", [2], "x" * 300_000)))

    assert play(use, "double") == [2, "aa", [2, 2], "x" * 600_000]
    assert play(lambda worker: worker.ask(1, SECONDS), "adding", 4) == 5


@pytest.mark.parametrize(
    ("message", "error", "says"),
    [
        ("raise", WorkerError, "KeyError: 'text'"),
        ("exit", WorkerDied, "ended with status 3"),
        ("abort", WorkerDied, "died of SIGABRT"),
        ("sleep", WorkerTooSlow, "did not answer within 0.5 s"),
    ],
)
def test_a_call_without_an_answer(message: str, error: type[Exception], says: str):
    async def use(worker: Worker) -> tuple[int, int]:
        first = await worker.ask("pid", SECONDS)
        with pytest.raises(error, match=says):
            await worker.ask(message, 0.5 if message == "sleep" else SECONDS)
        return first, await worker.ask("pid", SECONDS)

    first, second = play(use)
    assert (first == second) == (error is WorkerError)  # else the next call is in another process


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (f"{FUNCTIONS}:broken", "ValueError: no such thing"),
        (f"{FUNCTIONS}:gone", "AttributeError: .*gone"),
        ("no.such.module:f", "ModuleNotFoundError"),
    ],
)
async def test_a_function_that_cannot_be_loaded(target: str, says: str):
    worker = Worker(target, {})
    with pytest.raises(WorkerError, match=says):
        await worker.ask(1, SECONDS)
    assert not worker.alive


@pytest.mark.parametrize("way", ["cancel", "kill", "close"])
def test_a_call_under_way_ends_with_its_process(way: str):
    async def use(worker: Worker) -> None:
        await worker.ask("pid", SECONDS)
        call = asyncio.ensure_future(worker.ask("sleep", SECONDS))
        await asyncio.sleep(0.1)
        if way == "close":
            await worker.close()
        else:
            call.cancel() if way == "cancel" else worker.kill()
        with pytest.raises(asyncio.CancelledError if way == "cancel" else WorkerDied):
            await call

    play(use)


def test_what_it_starts_ends_with_it_and_reads_nothing():
    async def use(worker: Worker) -> int:
        assert await worker.ask("read", SECONDS) == ""
        return await worker.ask("start", SECONDS)

    assert play(use) not in children()


def test_it_outlives_an_event_loop_and_ends_with_its_object():
    before, worker = children(), Worker(f"{FUNCTIONS}:pid")

    async def both(asked: Worker) -> set[int]:
        return {*await asyncio.gather(asked.ask(0, SECONDS), asked.ask(0, SECONDS))}

    assert len(asyncio.run(both(worker)) | asyncio.run(both(worker))) == 1
    del worker
    gc.collect()
    wait_until(lambda: children() <= before)


PARENT = f"""
import asyncio
from TrainingFactory.common.workers import Worker
async def main():
    worker = Worker("{FUNCTIONS}:do")
    print(await worker.ask("pid", 60), await worker.ask("start", 60), flush=True)
    await worker.ask("sleep", 1000)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux does it")
def test_it_dies_with_a_killed_parent():
    """Also what it has started, and in the middle of a call: nobody reads the pipe then."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    wait_until(lambda: not any(map(_lives, pids)))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
