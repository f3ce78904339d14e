"""A judge of the run's own, in a process of its own: it starts, scores, is made anew, and ends with the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.parrot import parrot
from tests.kits.run import Parity, Quiet, rows, small
from TrainingFactory.assembly.rewards import check_reward
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import ConfigError
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that gives everything 7 of 10."""
    return str(parrot(tmp_path_factory.mktemp("judge"), "Score: 7"))


def section(**keys: Any) -> dict[str, Any]:
    return {"type": "model_judge", "judge": keys}


def engines() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [each for each in found if "TrainingFactory.cluster.local_child" in " ".join(each.cmdline())]


class Killing(Quiet):
    """Kills the judge after the first step."""

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        super().step(step, total, metrics)
        for each in engines() if step == 1 else ():
            os.kill(each.pid, signal.SIGKILL)


@pytest.mark.slow
def test_it_scores_is_made_anew_when_it_is_killed_and_ends_with_its_run(judge: str, tmp_path: Path) -> None:
    part = section(model=judge) | {"weight": 2.0, "options": {"judge_unfinished": True}}
    few = {"max_steps": 4, "batch_size": 2, "group_size": 2}
    chosen = small(tmp_path, training=few, reward={"parts": {"said": part}})
    watcher = Killing(fail_at=3)
    with pytest.raises(RuntimeError, match="broken off"):
        Training(chosen, name="judged", objects=UserObjects(environment=Parity), watcher=watcher).train()
    assert [row["reward"] for row in rows(tmp_path / "judged" / "metrics.jsonl")] == pytest.approx([1.4] * 3)
    assert not engines()
    told = [text for text in watcher.said if "judge" in text]
    assert told[0] == f"starting the judge {judge}: native, engines: 1"
    assert told[1].startswith("judge 0, process ") and "is ready after" in told[1]
    assert told[2].startswith("judge 0, process") and "restarting it" in told[2]


@pytest.mark.slow
def test_one_that_cannot_be_loaded_is_an_error_before_the_first_step(judge: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in Path(judge).iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"no weights")
    chosen = small(tmp_path / "runs", reward=section(model=str(broken)))
    with pytest.raises(ValueError, match=r"judge 0, process \d+: .*model\.safetensors is damaged"):
        Training(chosen, name="judged", objects=UserObjects(environment=Parity), watcher=Quiet()).train()
    assert not engines() and not (tmp_path / "runs" / "judged").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (section(replicas=1), "reward.judge.model: is missing"),
        (section(modle="x"), "reward.judge.modle: is not an option of reward.judge; did you mean model?"),
        (section(model="nowhere"), "reward.judge.model: there is no such run or model"),
        (section(model="builtin:tiny", replicas=2), "reward.judge.replicas: needs compute.backend=ray"),
        (section(model="builtin:tiny") | {"model": "m"}, "reward.model: is for a judge at an endpoint"),
        (
            section(model="builtin:tiny") | {"options": {"base_url": "http://127.0.0.1:1/v1"}},
            "reward.options.base_url: is for a judge at an endpoint, but reward.judge starts one",
        ),
        (
            section(model="builtin:tiny") | {"options": {"options": {"stop": "x"}}},
            "reward.options.options.stop: is not an option of a judge of the run's own",
        ),
        (
            {"type": "rule_based", "options": {"rule": "numeric"}, "judge": {"model": "builtin:tiny"}},
            "reward.judge: is for reward.type=model_judge",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told_by_key(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_reward(TrainingConfig(reward=given))
    assert told in str(error.value)
