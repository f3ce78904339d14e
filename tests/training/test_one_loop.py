"""A run is one asynchronous program: from a script, a notebook or a running loop, and its loop never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kits.run import Parity, Quiet, assert_same_run, brief, go_on
from TrainingFactory.common.event_loop import run
from TrainingFactory.learning import policy
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import ToolCall


def training(folder: Path, name: str, watcher: Any = None, steps: int = 4, **objects: Any) -> Training:
    config, given = (
        brief(folder, training={"max_steps": steps}),
        UserObjects(**({"environment": Parity} | objects)),
    )
    return Training(config, name=name, objects=given, watcher=watcher or Quiet())


def test_the_same_run_from_a_script_inside_a_loop_and_awaited(whole: Path, tmp_path: Path) -> None:
    async def inside() -> None:
        assert training(tmp_path, "inside").train().state == "finished"
        assert (await training(tmp_path, "awaited").train_async()).state == "finished"

    asyncio.run(inside())
    assert_same_run(whole, tmp_path / "inside")
    assert_same_run(whole, tmp_path / "awaited")


def test_the_loop_goes_on_while_a_step_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, checkpoints and files are made on threads, the policy's always on the same one; a call that is under way
    meanwhile is answered in time."""
    threads, update, answered = set[str](), policy.train_step, list[str]()

    def slow(*given: Any) -> dict[str, float]:
        threads.add(threading.current_thread().name)
        time.sleep(0.3)
        return update(*given)

    @tool(timeout=5.0)
    async def short() -> str:
        """Wait a little."""
        await asyncio.sleep(0.01)
        return "done"

    async def ask() -> None:
        executor = AsyncToolExecutor([short])
        while True:
            [result] = await executor.batch_execute([ToolCall("short")])
            answered.append(result.content)

    async def everything() -> None:
        asking = asyncio.create_task(ask())
        await training(tmp_path, "run", steps=2).train_async()
        asking.cancel()

    monkeypatch.setattr(policy, "train_step", slow)
    asyncio.run(everything())
    # Two steps slept 0.3 s each; a loop that waited for them would have come to a few calls a step.
    assert threads == {"policy"} and len(answered) > 2 * 8 and set(answered) == {"done"}


def test_a_reward_of_another_loop_is_told_how_to_go_on(tmp_path: Path) -> None:
    """As in a notebook: an object that is bound to its loop, in a run that has a loop of its own."""

    async def notebook() -> tuple[str, str]:
        theirs = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(theirs.wait(), 0.01)  # from here on it belongs to this loop

        async def reward(episode: Any) -> float:
            return float(await theirs.wait())

        with pytest.raises(ValueError) as told:
            training(tmp_path, "own", steps=1, reward=reward).train()
        theirs.set()
        report = await training(tmp_path, "theirs", steps=1, reward=reward).train_async()
        return str(told.value), report.state

    text, state = asyncio.run(notebook())
    assert "await trainer.train_async()" in text and state == "finished"


class Interrupting(Quiet):
    """A watcher in whose third step Ctrl-C comes to the main thread, as the terminal or a notebook sends it."""

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        main = threading.main_thread().ident
        if step == 3 and main is not None:
            signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("inside", [False, True])
def test_an_interrupt_stops_with_a_checkpoint(whole: Path, tmp_path: Path, inside: bool) -> None:
    """In a script the loop takes the signal; inside a running loop the waiting caller does."""

    async def notebook() -> Any:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as a kernel has it
        try:
            return training(tmp_path, "run", Interrupting()).train()
        finally:
            signal.signal(signal.SIGINT, before)

    report = asyncio.run(notebook()) if inside else training(tmp_path, "run", Interrupting()).train()
    folder = RunFolder(tmp_path / "run")
    assert report.state == "interrupted" and folder.checkpoints()[-1].name == f"step-{report.steps:06d}"
    assert report.steps in (3, 4) and folder.state == "interrupted"
    assert go_on(folder.path).state == "finished"
    assert_same_run(whole, folder.path)


def test_run_gives_back_results_and_errors_wherever_it_is_called() -> None:
    async def value() -> int:
        await asyncio.sleep(0)
        return 3

    async def broken() -> None:
        raise OSError("no disk")

    async def inside() -> int:
        with pytest.raises(OSError, match="no disk"):
            run(broken)
        return run(value)

    assert run(value) == 3 and asyncio.run(inside()) == 3
    with pytest.raises(OSError, match="no disk"):
        run(broken)
