"""Judges behind `tfactory serve`: the built-in model, taught in a few steps to say `Score: 9` where an answer has the
word right in it and `Score: 2` otherwise, and as it is before that."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kits.judge import finished, scored
from tests.kits.run import Quiet, rows, small, train
from tests.kits.serve import HANG, live
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.words import NAMES
from TrainingFactory.rewards.judge.endpoints import JudgeFailure, OpenAIEndpoint, Reply
from TrainingFactory.rewards.model_judge import model_judge
from TrainingFactory.rewards.workers.distributed import DistributedRewardModel
from TrainingFactory.services.build.training import Training
from TrainingFactory.services.serving.server import make_server, served_sections
from TrainingFactory.services.training.dataset import Objects
from TrainingFactory.types import Message, Reward, Trajectory

pytestmark = pytest.mark.usefixtures("judge_key")
RIGHT, WRONG = 0.9, 0.2


def answers(count: int, seed: int) -> list[tuple[Trajectory, float]]:
    """Answers, and what they are worth."""
    rng, found = random.Random(seed), list[tuple[Trajectory, float]]()
    for number in range(count):
        word, value = ("right", RIGHT) if number % 2 else ("wrong", WRONG)
        found.append((finished(f"{rng.choice(NAMES)} {word} {rng.choice(NAMES)}"), value))
    return found


class Noting(OpenAIEndpoint):
    """Notes what the server says that it has counted."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(
            url, "judge", api_key_env=None, options={"temperature": 0.0, "max_tokens": 24} | options
        )
        self.usage: list[dict[str, int]] = []

    async def exchange(self, body: dict[str, Any]) -> bytes:
        data = await super().exchange(body)
        self.usage.append(json.loads(data)["usage"])
        return data


class Writing:
    """Writes down what a judge is asked."""

    identity = "writing"

    def __init__(self) -> None:
        self.asked: list[Sequence[Message]] = []

    async def ask(self, messages: Sequence[Message], number: int) -> Reply:
        self.asked.append(messages)
        return Reply("Score: 1", 1, 1)

    async def check(self) -> None: ...

    async def close(self) -> None: ...


def judge(model: Any, **options: Any) -> Any:
    return model_judge(model=model, **{"template": "{answer}", "fence_seed": 1, "retries": 0} | options)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a model that has learned to judge."""
    folder, lessons, writing = tmp_path_factory.mktemp("judge"), answers(160, seed=0), Writing()
    for each, _ in lessons:
        scored(judge(writing), each)
    data = [
        {
            "messages": [{"role": one.role, "content": one.content} for one in asked]
            + [{"role": "assistant", "content": f"Score: {value * 10:g}"}]
        }
        for asked, (_, value) in zip(writing.asked, lessons, strict=True)
    ]
    (folder / "lessons.jsonl").write_text("\n".join(map(json.dumps, data)))
    config = TrainingConfig(
        training={
            "algorithm": "sft",
            "optimizer": "muon",
            "learning_rate": 0.006,
            "batch_size": 4,
            "max_steps": 40,
        },
        data={"dataset": str(folder / "lessons.jsonl")},
        logging={"output_dir": str(folder)},
    )
    Training(config, name="taught", objects=Objects(), watcher=Quiet()).train()
    return folder / "taught"


@contextmanager
def serving(model: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and its address."""
    command = [
        sys.executable,
        "-m",
        "TrainingFactory.cli",
        "serve",
        str(model),
        "--port",
        "0",
        "--name",
        "judge",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[3]
        finally:
            process.kill()


async def watched(
    pool: DistributedRewardModel, url: str, trajectories: list[Trajectory]
) -> tuple[list[Reward | None], int]:
    """Rewards, and the most requests that the server has said to work on at the same time."""
    most, judging = 0, asyncio.create_task(pool.compute_rewards(trajectories))
    async with httpx.AsyncClient(trust_env=False, timeout=HANG) as client:
        while not judging.done():
            most = max(most, (await client.get(url.replace("/v1", "/health"))).json()["running"])
            await asyncio.sleep(0.001)
    return await judging, most


def test_verdicts_of_a_served_model(taught: Path):
    """By the command, in a process of its own, which is killed in the middle of the last batch."""
    told = answers(24, seed=1)
    with serving(taught) as (process, url):
        endpoint = Noting(url)
        served = judge(endpoint)

        rewards, most = asyncio.run(
            watched(DistributedRewardModel(model=served), url, [each for each, _ in told])
        )
        assert [each and each.outcome for each in rewards] == [value for _, value in told]
        assert most > 1
        usage = served.client.usage
        assert usage.requests == len(endpoint.usage) == len(told) and not usage.estimated
        assert usage.input_tokens == sum(each["prompt_tokens"] for each in endpoint.usage) > 100 * len(told)
        assert usage.output_tokens == sum(each["completion_tokens"] for each in endpoint.usage) > len(told)
        sections = served_sections(str(taught))
        with live(make_server(TrainingConfig(**sections | {"sampling": {"slots": 2}}), "judge")) as client:
            other = Noting(f"{str(client.base_url).rstrip('/')}/v1")
            pool = DistributedRewardModel(model=[served, judge(other)], per_worker=2)
            rewards = asyncio.run(killed_on_the_way(pool, process, [each for each, _ in told * 2]))
    assert [each and each.outcome for each in rewards] == [value for _, value in told * 2]
    assert not pool.dropped and pool.moved >= 1 and len(other.usage) > len(told)


async def killed_on_the_way(
    pool: DistributedRewardModel, process: subprocess.Popen[str], trajectories: list[Trajectory]
) -> list[Reward | None]:
    judging = asyncio.create_task(pool.compute_rewards(trajectories))
    while pool.workers[0].done < 3:
        await asyncio.sleep(0.001)
    process.kill()
    assert not judging.done()
    return await judging


def test_a_served_model_that_cannot_judge(tmp_path: Path):
    """Untrained, so that it talks nonsense: in a run every episode is dropped, with what it has said."""
    config = TrainingConfig(sampling={"slots": 8})
    with live(make_server(config, "judge")) as client:
        url = f"{str(client.base_url).rstrip('/')}/v1"
        found = scored(
            judge(Noting(url, temperature=1.0, stop=["e"], seed=0)), *(each for each, _ in answers(6, 2))
        )
        assert {each.kind for each in found if isinstance(each, JudgeFailure)} <= {"unreadable", "cut"}
        assert len(found) == 6 and all(isinstance(each, JudgeFailure) for each in found)
        options = {"base_url": url, "api_key_env": None, "judge_unfinished": True, "retries": 0}
        section = {
            "type": "model_judge",
            "model": "judge",
            "options": options | {"options": {"max_tokens": 4}},
        }
        with pytest.raises(
            ValueError, match=r"none of 4 .*mostly: .*the judge's answer (was cut off|is not)"
        ):
            train(small(tmp_path, reward=section), "run")
    assert [row["episodes/unscored"] for row in rows(tmp_path / "run" / "metrics.jsonl")] == [12, 12]
