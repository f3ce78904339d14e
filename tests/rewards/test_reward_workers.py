"""Rewards from a pool of workers, and in processes: what they start, are given, and fail at."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.judge import Said, finished, judge_at, judging, scored_by
from tests.kits.mcp import children
from tests.kits.waiting import wait_until
from TrainingFactory.rewards.adapt import Unscored
from TrainingFactory.rewards.workers.distributed import RewardWorkerPool
from TrainingFactory.rewards.workers.process import FinishedEpisode, RewardProcess, WorkerFailure
from TrainingFactory.types import Reward, Trajectory

pytestmark = pytest.mark.usefixtures("judge_key")


def test_one_dead_worker_loses_nothing():
    trajectories = [finished(f"quality {number}") for number in range(24)]

    def by_quality(prompt: str, number: int) -> str:
        return f"Score: {int(re.findall(r'quality (.*)', prompt)[0]) % 10}"

    def dying(prompt: str, number: int) -> Said:  # in the middle of the batch
        return by_quality(prompt, number) if number < 3 else None

    with judging(by_quality) as good, judging(dying) as bad:
        pool = RewardWorkerPool(model=[judge_at(bad.url), judge_at(good.url)], num_workers=2, per_worker=2)
        rewards = asyncio.run(pool.compute_rewards(trajectories))
        assert [reward.outcome for reward in rewards if reward] == [
            pytest.approx(number % 10 / 10) for number in range(24)
        ]
        first, second = pool.workers
        assert first.num_done == 3 and first.num_failed >= 1 and second.num_done == 21 and not pool.dropped
        assert pool.metrics["pool/moved"] == pool.num_retried >= 1
        assert len(bad.asked) < 12  # it is left alone, not asked for every row


def test_an_address_that_is_down_is_named_once(caplog: pytest.LogCaptureFixture):
    down = {"now": True}

    def flaky(prompt: str, number: int) -> Said:
        return None if down["now"] else "Score: 5"

    with judging("Score: 5") as good, judging(flaky) as bad:
        pool = RewardWorkerPool(model=[judge_at(bad.url), judge_at(good.url)], per_worker=1)

        async def play() -> None:
            await pool.compute_rewards([finished(f"quality {number}") for number in range(12)])
            while not pool.workers[0].is_down:
                await pool.compute_rewards([finished("again")] * 4)
            await pool.compute_rewards([finished("more")] * 8)
            down["now"] = False
            while pool.workers[0].is_down:
                await asyncio.sleep(0.05)
                await pool.compute_rewards([finished("and more")] * 4)

        asyncio.run(asyncio.wait_for(play(), 60))
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2 and all(f"worker 0 at {bad.url}" in text for text in said)
        assert "is down" in said[0] and "has recovered" in said[1] and good.url not in " ".join(said)


def test_a_budget_is_for_all_addresses_together():
    """Also what one that is down cannot spend."""
    with judging("Score: 5") as one, judging("Score: 5") as two, judging(lambda *_: None) as dead:
        pool = RewardWorkerPool(
            "m",
            base_url=[dead.url, one.url, two.url],
            api_key_env=None,
            retries=0,
            budget={"max_requests": 30},
            per_worker=1,
        )
        rewards = scored_by(pool, [finished(f"answer {n}") for n in range(40)])
    asked = len(one.asked + two.asked)
    assert asked + len(dead.asked) == 30 and asked > 20
    assert sum(reward is not None for reward in rewards) == asked
    assert pool.dropped.total() == 40 - asked
    assert all("budget.max_requests is 30" in reason for reason in pool.dropped)


def test_rows_go_to_the_worker_with_the_fewest():
    async def play() -> None:
        release = asyncio.Event()
        running = {"slow": 0, "quick": 0}

        async def slow(episode: Any) -> float:
            running["slow"] += 1
            await release.wait()
            return 0.0

        async def quick(episode: Any) -> float:
            running["quick"] += 1
            if running["quick"] == 18:
                release.set()
            return 1.0

        pool = RewardWorkerPool(model=[slow, quick], per_worker=2)
        rewards = await pool.compute_rewards([finished() for _ in range(20)])
        assert running == {"slow": 2, "quick": 18} and sum(each.outcome for each in rewards if each) == 18

    asyncio.run(asyncio.wait_for(play(), 30))


def test_what_no_worker_can_score_is_dropped_and_counted():
    answers: dict[str, Any] = {
        "nan": float("nan"),
        "text": "0.5",
        "none": None,
        "raises": ValueError("no"),
        "list": [1.0],
        "fine": 0.5,
        "exits": SystemExit(3),
    }

    asked: Counter[str] = Counter()

    def reward(episode: Any) -> Any:
        asked[episode.task.id] += 1
        answer = answers[episode.task.id]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    pool = RewardWorkerPool(model=reward, num_workers=3)
    rewards = asyncio.run(pool.compute_rewards([finished(name=name) for name in answers]))
    assert dict(zip(answers, rewards, strict=True)) == dict.fromkeys(answers) | {"fine": Reward(0.5)}
    assert pool.dropped.total() == 6 and any("finite number" in reason for reason in pool.dropped)
    assert any("all 3 reward workers failed" in reason for reason in pool.dropped)
    assert asked == dict.fromkeys(answers, 1) | {"exits": 3}  # what is the row's own is not tried again


def test_all_workers_down():
    def gone(episode: Any) -> float:
        raise ConnectionError("gone")

    pool = RewardWorkerPool(model=[gone, gone], patience=0.0)
    assert asyncio.run(pool.compute_rewards([finished() for _ in range(5)])) == [None] * 5
    assert pool.dropped.total() == 5


def test_workers_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One of them is brought down in the middle of the batch, by a row that others survive."""
    (tmp_path / "own_rewards.py").write_text(
        "import os, pathlib\n"
        "async def reward(episode):\n"
        "    print('not an answer')\n"
        "    text = episode.trajectory.answer\n"
        "    if text == 'deadly':\n"
        f"        mark = pathlib.Path({str(tmp_path / 'died')!r})\n"
        "        if not mark.exists():\n"
        "            mark.touch()\n"
        "            os._exit(9)\n"
        "        return 9\n"
        "    return float(text)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = ["0.5", "deadly", "nonsense", "nan", "2", "3"]
    pool = RewardWorkerPool(model="own_rewards:reward", num_workers=2, timeout=60)
    rewards = asyncio.run(pool.compute_rewards([finished(text) for text in texts]))
    assert rewards == [Reward(0.5), Reward(9), None, None, Reward(2), Reward(3)]
    assert pool.num_retried == 1 and pool.dropped.total() == 2
    again = scored_by(pool, [finished("1") for _ in range(4)])  # another event loop
    assert again == [Reward(1.0)] * 4
    assert not any(worker.model.alive for worker in pool.workers)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("own_rewards.reward", {}, "package.module:function"),
        (3, {}, "it must be a function"),
        ([], {}, "num_workers"),
        (print, {"num_workers": 0}, "num_workers\n  Input should be greater"),
        ([print, print], {"num_workers": 3}, "there are 2 models"),
        (print, {"timeout": 0}, "timeout\n  Input should be greater"),
    ],
)
def test_a_wrong_pool(model: Any, options: dict[str, Any], says: str):
    with pytest.raises(ValueError, match=says):
        RewardWorkerPool(model, **options)


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
    assert "forked took longer than 2 s" in str(late)
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
        assert f"{named} is not JSON" in str(found) and "processes: 0" in str(found)
    assert children() <= processes


def test_a_failure_in_a_process_is_what_it_is_in_a_thread(file: Path):
    found = scored(f"{file}:failing", "row", "network")
    assert [type(each) for each in found] == [Unscored, WorkerFailure]
    pool = RewardWorkerPool(f"{file}:failing", num_workers=2, timeout=20)
    rewards = scored_by(pool, [finished(text) for text in ("network", "row", "ok")])
    assert [reward is not None for reward in rewards] == [False, False, True]
    assert sorted(worker.num_failed for worker in pool.workers) == [1, 1]  # the row went to both
    assert any(
        "all 2 reward workers failed" in reason and "out of reach" in reason for reason in pool.dropped
    )


def test_a_process_that_cannot_be_started_is_not_the_row_s_fault(file: Path):
    good, changed = RewardProcess(f"{file}:given", timeout=20), file.with_name("changed.py")
    changed.write_text(FILE)
    bad = RewardProcess(f"{changed}:given", timeout=20)
    changed.write_text("def other(episode):\n    return 1.0\n")  # since it was made
    pool = RewardWorkerPool([bad, good], patience=0.1)

    async def play() -> list[Any]:
        try:
            with pytest.raises(WorkerFailure, match=r"has no function 'given'"):
                await bad(FinishedEpisode(finished("a")))
            return await pool.compute_rewards([finished("a"), finished("b")])
        finally:
            await asyncio.gather(good.close(), bad.close())

    assert asyncio.run(play()) == [Reward(1.0), Reward(1.0)] and pool.num_retried == 1 and not pool.dropped
