"""Runs of GRPO: tasks that teach nothing are made up for, a killed run goes on exactly, and the model learns."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.kits.run import Parity, Quiet, assert_same_run, rows, small
from tests.kits.warm import lift
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.services.build.training import Training
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.services.training.dataset import Objects


class Half(Parity):
    """Of the 7 tasks, every second one rewards whatever is done."""

    def reward(self, episode: Any) -> float:
        return 1.0 if self.dull(episode.task.id) else super().reward(episode)

    @classmethod
    def dull(cls, task: str) -> bool:
        return [task.id for task in cls.tasks("train", 0, 7)].index(task) % 2 == 0


class Fatal(Quiet):
    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        if step == self.fail_at:
            os.kill(os.getpid(), signal.SIGKILL)


def half(folder: Path, refill: int, **training: Any) -> TrainingConfig:
    training = {"batch_size": 2, "max_steps": 7} | training
    return small(folder, training=training, grpo={"refill": refill})


def run(config: TrainingConfig, name: str, watcher: Quiet | None = None, environment: Any = Half) -> Path:
    """Starts the run, or goes on with it."""
    folder = Path(config.logging.output_dir) / name
    found = RunFolder(folder) if folder.exists() else None
    objects = Objects(environment=environment)
    Training(config, name=name, run=found, objects=objects, watcher=watcher or Quiet()).train()
    return folder


def killed(folder: str) -> None:
    run(half(Path(folder), refill=2), "broken", Fatal(fail_at=5))


def test_refill_makes_up_for_tasks_that_teach_nothing(tmp_path: Path) -> None:
    plain = run(half(tmp_path, refill=0), "plain")
    assert [len(row["tasks"]) for row in rows(plain / "consumed.jsonl")] == [2, 2, 2, 1, 2, 2, 2]
    assert all(row["groups/refilled"] == 0 for row in rows(plain / "metrics.jsonl"))
    filled = run(half(tmp_path, refill=2), "filled")
    consumed, metrics = rows(filled / "consumed.jsonl"), rows(filled / "metrics.jsonl")
    taken: list[str] = []
    extra = 0
    for row, figures in zip(consumed, metrics, strict=True):
        tasks = row["tasks"]
        assert row["epoch"] == len(taken) // 7 == figures["epoch"]
        dull = [Half.dull(task) for task in tasks]
        assert figures["groups/dropped"] == sum(dull)
        left = 7 - len(taken) % 7
        # by hand: a batch, then twice as many as are missing, as long as the epoch has some
        wanted = min(2, left)
        for _ in range(2):
            wanted += min(2 - dull[:wanted].count(False), left - wanted)
        assert len(tasks) == wanted
        assert figures["groups/refilled"] == len(tasks) - min(2, left)
        extra += len(tasks) - min(2, left)
        taken += tasks
    assert extra >= 3
    for start in range(0, len(taken) - 6, 7):
        assert len(set(taken[start : start + 7])) == 7  # every task once an epoch, also with refill
    saved = load_trajectories(filled / "trajectories.jsonl")
    assert list(dict.fromkeys(f"{t.group}" for t in saved)) == [
        f"{row['step'] - 1}/{task}" for row in consumed for task in row["tasks"]
    ]


def test_a_killed_run_with_refill_goes_on_exactly(tmp_path: Path) -> None:
    """Killed at step 5, with its last checkpoint at step 4."""
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(str(tmp_path),))
    process.start()
    whole = run(half(tmp_path, refill=2), "whole")
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    broken = RunFolder(tmp_path / "broken")
    assert len(broken.metrics()) == 5 and broken.checkpoints()[-1].name == "step-000004"
    run(half(tmp_path, refill=2), "broken")
    assert_same_run(whole, broken.path)


def test_no_more_tasks_are_spent_where_nothing_can_be_scored(tmp_path: Path) -> None:
    class Broken(Parity):
        def reward(self, episode: Any) -> float:
            raise RuntimeError("no score today")

    with pytest.raises(ValueError, match="no score today"):
        run(half(tmp_path, refill=3), "a", environment=Broken)
    assert [len(row["tasks"]) for row in rows(tmp_path / "a" / "consumed.jsonl")] == [2, 2]


class Dull(Parity):
    def reward(self, episode: Any) -> float:
        return 1.0


def test_equal_rewards_are_an_empty_step(tmp_path: Path) -> None:
    """Not even the decay of the weights moves them."""
    config = half(tmp_path, refill=0, max_steps=2, weight_decay=0.5)
    folder = run(config, "a", environment=Dull)
    assert all(row["rows"] == row["trained_tokens"] == 0 for row in rows(folder / "metrics.jsonl"))
    before = run(half(tmp_path, refill=0, max_steps=1, weight_decay=0.5), "b", environment=Dull)
    [one] = (folder / "checkpoints").glob("step-*/model.safetensors")
    [other] = (before / "checkpoints").glob("step-*/model.safetensors")
    assert one.read_bytes() == other.read_bytes()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"training": {"minibatches": 2}}, r"training\.minibatches is 2, which does not divide training\.batch_size 3"),
    ({"training": {"group_size": 1}}, r"training\.group_size is 1"),
    ({"grpo": {"overlong_length": 8, "overlong_buffer": 9}}, r"grpo\.overlong_buffer is 9; .*overlong_length \(8\)"),
    ({"grpo": {"advantage": "reinforce++", "scale_rewards": True}}, r"grpo\.scale_rewards is true; .*false"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "text"), WRONG)
def test_what_cannot_be_is_told_at_once(tmp_path: Path, sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Training(small(tmp_path, **sections), name="a", objects=Objects(environment=Parity))
    assert not (tmp_path / "a").exists()


VARIANTS: dict[str, dict[str, Any]] = {
    "reinforce++": {"advantage": "reinforce++", "entropy": 0.01},
    "gspo": {"advantage": "rloo", "ratio": "sequence", "normalization": "sequence", "clip_low": 3e-3},
    "cispo": {"loss_kind": "cispo", "clip_high": 4.0, "importance_cap": 2.0, "kl": 0.01, "kl_estimator": "k2"},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains(tmp_path: Path, name: str) -> None:
    """Two passes in mini-batches: the ratio is 1 in the first update only."""
    training = {"max_steps": 2, "update_epochs": 2, "minibatches": 3}
    config = small(tmp_path, training=training, grpo=VARIANTS[name])
    metrics = rows(run(config, "a", environment=Parity) / "metrics.jsonl")
    assert all(row["skipped"] == 0 and row["grad_norm"] > 0 and row["logprob_diff"] > 1e-6 for row in metrics)
    assert ("kl" in metrics[0]) == ("importance_weight" in metrics[0]) == (name == "cispo")


def test_success_rises_from_the_warm_start(warm: Path, tmp_path: Path) -> None:
    before, after, report = lift(warm, tmp_path, training={"max_steps": 12})
    print(
        f"success {before:.2f} -> {after:.2f}, rewards {[round(row['reward'], 2) for row in report.rows[1:]]}"
    )
    assert after - before >= 0.3
    assert report.rows[-1]["reward"] > report.rows[1]["reward"]
