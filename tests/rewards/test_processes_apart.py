"""Rewards in processes: what they start, what they are given, and whose fault it is where they fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.judge import finished, scored_by
from tests.kits.mcp import children, wait_until
from TrainingFactory.rewards.adapt import Unscored
from TrainingFactory.rewards.workers.distributed import DistributedRewardModel
from TrainingFactory.rewards.workers.process import FinishedEpisode, RewardProcess, WorkerFailure
from TrainingFactory.types import Reward, Trajectory

GUARD = 60  # seconds; only a hang takes so long
FILE = """
import os
import time
from pathlib import Path

HERE = Path(__file__).parent

def forked(trajectory):
    if trajectory.answer == "ok":
        return 1.0
    child = os.fork()  # keeps all pipes
    if child == 0:
        if trajectory.answer == "away":
            os.setsid()  # out of the group as well
        time.sleep(300)
    (HERE / "child").write_text(str(child))
    if trajectory.answer != "answers":
        time.sleep(300)
    return 1.0

def failing(trajectory):
    if trajectory.answer == "ok":
        return 1.0
    if trajectory.answer == "row":
        raise KeyError("row")
    raise ConnectionError("out of reach")

def given(trajectory):
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "apart.py").write_text(FILE)
    return tmp_path / "apart.py"


def scored(target: str, *rows: str | Trajectory, timeout: float = GUARD) -> list[Any]:
    """What one process gives for each row, or what it raises."""
    process = RewardProcess(target, timeout)

    async def one(row: str | Trajectory) -> Any:
        try:
            return (await process(FinishedEpisode(finished(row) if isinstance(row, str) else row))).outcome
        except (Unscored, WorkerFailure) as error:
            return error

    async def all_of_them() -> list[Any]:
        try:
            return [await asyncio.wait_for(one(row), GUARD) for row in rows]
        finally:
            await process.close()

    return asyncio.run(all_of_them())


def child_of(file: Path) -> int:
    """The process that the reward has started, which must be gone."""
    pid = int((file.parent / "child").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return pid


@pytest.mark.parametrize("child", ["waits", "away"])
def test_a_reward_that_forks_is_ended_in_time(file: Path, child: str):
    """The child has the pipe of the answers, so that its end says nothing."""
    first, late, again = scored(f"{file}:forked", "ok", child, "ok", timeout=2)
    assert (first, again) == (1.0, 1.0)  # in two processes
    assert "forked took longer than 2 s, and its process was ended" in str(late)
    if child == "away":  # it left the group
        os.kill(int((file.parent / "child").read_text()), signal.SIGKILL)
    assert child_of(file)


def test_what_a_reward_has_started_ends_with_it(file: Path):
    assert scored(f"{file}:forked", "answers") == [1.0] and child_of(file)


def test_what_lies_around_replaces_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither in the working folder nor beside the file, which is on the path, behind all others."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        for module in ("queue", "secrets", "httpx"):
            (tmp_path / name / f"{module}.py").write_text(f"raise RuntimeError('{name}')\n")
    file = tmp_path / "there" / "apart.py"
    file.write_text("def given(episode):\n    import queue, secrets, httpx\n    return 1.0\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert scored(f"{file}:given", "a") == [1.0]


@pytest.mark.parametrize(
    ("answer", "metadata", "named"),
    [
        ((1, 2), {}, "answer"),
        (None, {"ids": {3: "x"}}, "metadata.ids"),
        (None, {3: "x"}, "metadata.3"),
        (None, {"seen": {1}}, "metadata.seen"),
        (None, {"deep": [{"pair": (1, 2)}]}, "metadata.deep"),
        ([1, {"a": None}], {"nan": float("nan"), "text": "x\ud800", "yes": True}, None),
    ],
)
def test_a_task_that_would_be_another_one_there_is_not_scored(
    file: Path, answer: Any, metadata: Any, named: Any
):
    row = finished("ok")
    row.task.answer, row.task.metadata = answer, metadata
    processes = children()
    [found] = scored(f"{file}:given", row)
    if named is None:
        assert found == 1.0
    else:
        assert f"{named} cannot go to a process as it is" in str(found) and "processes: 0" in str(found)
    assert children() <= processes


def test_a_failure_in_a_process_is_what_it_is_in_a_thread(file: Path):
    found = scored(f"{file}:failing", "row", "network")
    assert [type(each) for each in found] == [Unscored, WorkerFailure]
    pool = DistributedRewardModel(f"{file}:failing", num_workers=2, timeout=20)
    rewards = scored_by(pool, [finished(text) for text in ("network", "row", "ok")])
    assert [reward is not None for reward in rewards] == [False, False, True]
    assert sorted(worker.failed for worker in pool.workers) == [1, 1]  # the row went to both
    assert any("none of 2 workers" in reason and "out of reach" in reason for reason in pool.dropped)


def test_a_process_that_cannot_be_started_is_not_the_row_s_fault(file: Path):
    good, changed = RewardProcess(f"{file}:given", timeout=20), file.with_name("changed.py")
    changed.write_text(FILE)
    bad = RewardProcess(f"{changed}:given", timeout=20)
    changed.write_text("def other(episode):\n    return 1.0\n")  # since it was made
    pool = DistributedRewardModel([bad, good], patience=0.1)

    async def play() -> list[Any]:
        try:
            with pytest.raises(WorkerFailure, match=r"could not be started.*has no function 'given'"):
                await bad(FinishedEpisode(finished("a")))
            return await pool.compute_rewards([finished("a"), finished("b")])
        finally:
            await asyncio.gather(good.close(), bad.close())

    assert asyncio.run(play()) == [Reward(1.0), Reward(1.0)] and pool.moved == 1 and not pool.dropped
