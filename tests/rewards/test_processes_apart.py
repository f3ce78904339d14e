"""Rewards in processes: what they start, what they are given, and whose fault it is where they fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import finished
from TrainingFactory.rewards.adapt import Unscored
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.workers import processes
from TrainingFactory.rewards.workers.distributed import DistributedRewardModel
from TrainingFactory.rewards.workers.processes import FinishedEpisode, RewardProcess, WorkerFailure
from TrainingFactory.types import Reward

GUARD = 60  # seconds; only a hang takes so long
FILE = """
import os
import subprocess
import sys
import time
from pathlib import Path

from TrainingFactory.rewards.judge.endpoints import JudgeFailure

HERE = Path(__file__).parent

def forked(trajectory):
    if trajectory.answer == "ok":
        return 1.0
    if os.fork() == 0:  # keeps all pipes
        if trajectory.answer == "away":
            os.setsid()  # out of the group as well
        (HERE / "child").write_text(str(os.getpid()))
        time.sleep(300)
    if trajectory.answer != "answers":
        time.sleep(300)
    return 1.0

def reading(trajectory):
    return float(len(subprocess.run(["cat"], capture_output=True).stdout))

def failing(trajectory):
    if trajectory.answer == "ok":
        return 1.0
    if trajectory.answer == "judge":
        raise JudgeFailure("no line `Score: ...`", "unreadable")
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


def scored(process: RewardProcess, *answers: str, **task: Any) -> list[Any]:
    async def all_of() -> list[Any]:
        episodes = [FinishedEpisode(finished(answer, **task)) for answer in answers]
        found = [await asyncio.wait_for(process(each), GUARD) for each in episodes]
        return [reward.outcome for reward in found]

    return asyncio.run(all_of())


def ends(pid: int) -> bool:
    for _ in range(600):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # dead, and nobody has asked for it yet
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at processes as Linux shows them")
@pytest.mark.parametrize("child", ["waits", "away"])
def test_a_reward_that_forks_is_ended_in_time(file: Path, child: str, monkeypatch: pytest.MonkeyPatch):
    """The child has the pipe of the answers, so that its end says nothing."""
    monkeypatch.setattr(processes, "CLOSING_SECONDS", 0.2)
    process = RewardProcess(f"{file}:forked", timeout=2)
    try:
        assert scored(process, "ok") == [1.0]
        with pytest.raises(Unscored, match="forked took longer than 2 s, and its process was ended"):
            scored(process, child)
        assert scored(process, "ok") == [1.0]  # in another one
    finally:
        process.close()
        pid = int((file.parent / "child").read_text())
        if child == "away":
            os.kill(pid, signal.SIGKILL)
    assert ends(pid)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("answer", ["answers", "waits"])
def test_what_a_reward_has_started_ends_with_it(file: Path, answer: str):
    process = RewardProcess(f"{file}:forked", timeout=300)

    def call() -> None:
        with suppress(ConnectionError):  # closed in the middle of it
            scored(process, answer)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    child = file.parent / "child"
    while not child.exists() or not child.read_text():
        assert thread.is_alive()
        time.sleep(0.02)
    if answer == "answers":
        thread.join(GUARD)
    closing = threading.Thread(target=process.close, daemon=True)
    closing.start()
    closing.join(GUARD)
    thread.join(GUARD)
    assert not closing.is_alive() and not thread.is_alive() and ends(int(child.read_text()))


def test_a_program_that_a_reward_starts_reads_nothing_of_ours(file: Path):
    process = RewardProcess(f"{file}:reading", timeout=20)
    try:
        assert scored(process, "a", "b") == [0.0, 0.0]
    finally:
        process.close()


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
    process = RewardProcess(f"{file}:given", timeout=20)
    try:
        assert scored(process, "a") == [1.0]
    finally:
        process.close()


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
    process = RewardProcess(f"{file}:given", timeout=20)
    try:
        if named is None:
            assert asyncio.run(process(FinishedEpisode(row))) == Reward(1.0)
        else:
            with pytest.raises(Unscored, match=f"{named} cannot go to a process as it is.*processes: 0"):
                asyncio.run(process(FinishedEpisode(row)))
            assert process._process is None
    finally:
        process.close()


def test_a_failure_in_a_process_is_what_it_is_in_a_thread(file: Path, monkeypatch: pytest.MonkeyPatch):
    process = RewardProcess(f"{file}:failing", timeout=20)
    try:
        for answer, kind in (("row", Unscored), ("judge", JudgeFailure), ("network", WorkerFailure)):
            with pytest.raises(kind):
                scored(process, answer)
    finally:
        process.close()
    pool = DistributedRewardModel(f"{file}:failing", num_workers=2, timeout=20)
    try:
        found = asyncio.run(
            pool.compute_rewards([finished(text) for text in ("network", "row", "judge", "ok")])
        )
        assert [reward is not None for reward in found] == [False, False, False, True]
        assert sorted(worker.failed for worker in pool.workers) == [1, 1]  # the row went to both
        assert pool.dropped["judge: unreadable"] == 1
        assert any("none of 2 workers" in reason and "out of reach" in reason for reason in pool.dropped)
    finally:
        pool.close()


def test_a_process_that_cannot_be_started_is_not_the_row_s_fault(file: Path):
    good, bad = RewardProcess(f"{file}:given", timeout=20), RewardProcess(f"{file}:given", timeout=20)
    bad.target = f"{file}:nothing"  # as where a file has changed since
    pool = DistributedRewardModel([bad, good], patience=0.1)
    try:
        with pytest.raises(WorkerFailure, match=r"could not be started.*has no function 'nothing'"):
            scored(bad, "a")
        found = asyncio.run(pool.compute_rewards([finished("a"), finished("b")]))
        assert found == [Reward(1.0), Reward(1.0)] and pool.moved == 1 and not pool.dropped
    finally:
        good.close()
        bad.close()
