"""Rewards from a pool of workers."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import Said, finished, judge_at, judging, scored_by
from TrainingFactory.rewards.workers.distributed import DistributedRewardModel
from TrainingFactory.types import Reward

pytestmark = pytest.mark.usefixtures("judge_key")


def test_one_dead_worker_loses_nothing():
    trajectories = [finished(f"quality {number}") for number in range(24)]

    def by_quality(prompt: str, number: int) -> str:
        return f"Score: {int(re.findall(r'quality (.*)', prompt)[0]) % 10}"

    def dying(prompt: str, number: int) -> Said:  # in the middle of the batch
        return by_quality(prompt, number) if number < 3 else None

    with judging(by_quality) as good, judging(dying) as bad:
        pool = DistributedRewardModel(
            model=[judge_at(bad.url), judge_at(good.url)], num_workers=2, per_worker=2
        )
        rewards = asyncio.run(pool.compute_rewards(trajectories))
        assert [reward.outcome for reward in rewards if reward] == [
            pytest.approx(number % 10 / 10) for number in range(24)
        ]
        first, second = pool.workers
        assert first.done == 3 and first.failed >= 1 and second.done == 21 and not pool.dropped
        assert pool.metrics["pool/moved"] == pool.moved >= 1
        assert len(bad.asked) < 12  # it is left alone, not asked for every row


def test_an_address_that_is_down_is_named_once(caplog: pytest.LogCaptureFixture):
    down = {"now": True}

    def flaky(prompt: str, number: int) -> Said:
        return None if down["now"] else "Score: 5"

    with judging("Score: 5") as good, judging(flaky) as bad:
        pool = DistributedRewardModel(model=[judge_at(bad.url), judge_at(good.url)], per_worker=1)

        async def play() -> None:
            await pool.compute_rewards([finished(f"quality {number}") for number in range(12)])
            while not pool.workers[0].down:
                await pool.compute_rewards([finished("again")] * 4)
            await pool.compute_rewards([finished("more")] * 8)
            down["now"] = False
            while pool.workers[0].down:
                await asyncio.sleep(0.05)
                await pool.compute_rewards([finished("and more")] * 4)

        asyncio.run(asyncio.wait_for(play(), 60))
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2 and all(f"worker 0 at {bad.url}" in text for text in said)
        assert "is down" in said[0] and "is back" in said[1] and good.url not in " ".join(said)


def test_a_budget_is_for_all_addresses_together():
    """Also what one that is down cannot spend."""
    with judging("Score: 5") as one, judging("Score: 5") as two, judging(lambda *_: None) as dead:
        pool = DistributedRewardModel(
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
    assert all("budget.max_requests is 30, used are 30" in reason for reason in pool.dropped)


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

        pool = DistributedRewardModel(model=[slow, quick], per_worker=2)
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

    pool = DistributedRewardModel(model=reward, num_workers=3)
    rewards = asyncio.run(pool.compute_rewards([finished(name=name) for name in answers]))
    assert dict(zip(answers, rewards, strict=True)) == dict.fromkeys(answers) | {"fine": Reward(0.5)}
    assert pool.dropped.total() == 6 and any("must be finite" in reason for reason in pool.dropped)
    assert any("none of 3 workers" in reason for reason in pool.dropped)
    assert asked == dict.fromkeys(answers, 1) | {"exits": 3}  # what is the row's own is not tried again


def test_all_workers_down():
    def gone(episode: Any) -> float:
        raise ConnectionError("gone")

    pool = DistributedRewardModel(model=[gone, gone], patience=0.0)
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
    pool = DistributedRewardModel(model="own_rewards:reward", num_workers=2, timeout=60)
    rewards = asyncio.run(pool.compute_rewards([finished(text) for text in texts]))
    assert rewards == [Reward(0.5), Reward(9), None, None, Reward(2), Reward(3)]
    assert pool.moved == 1 and pool.dropped.total() == 2
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
        DistributedRewardModel(model, **options)
