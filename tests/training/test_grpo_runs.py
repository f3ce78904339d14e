"""Runs of GRPO: tasks that teach nothing are made up for, a killed run goes on exactly, and the model learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kits.run import EXACT, Parity, Quiet, assert_same_run, go_on, rows, small, train
from tests.kits.warm import lift
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.runs.folder import RunFolder


class Half(Parity):
    """Of the 7 tasks, every second one rewards whatever is done."""

    def reward(self, episode: Any) -> float:
        return 1.0 if self.dull(episode.task.id) else super().reward(episode)

    @classmethod
    def dull(cls, task: str) -> bool:
        return [task.id for task in cls.tasks("train", 0, 7)].index(task) % 2 == 0


def half(folder: Path, refill: int, **training: Any) -> TrainingConfig:
    training = {"batch_size": 2, "max_steps": 7} | training
    return small(folder, training=training, grpo={"refill": refill}, sampling=EXACT)


def run(config: TrainingConfig, name: str, watcher: Quiet | None = None, environment: Any = Half) -> Path:
    return train(config, name, watcher, environment=environment).run


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(half(tmp_path_factory.mktemp("refill"), refill=2), "filled")


def test_refill_makes_up_for_tasks_that_teach_nothing(filled: Path, tmp_path: Path) -> None:
    plain = run(half(tmp_path, refill=0, max_steps=4), "plain")
    assert [len(row["tasks"]) for row in rows(plain / "consumed.jsonl")] == [2, 2, 2, 1]
    assert all(row["groups/refilled"] == 0 for row in rows(plain / "metrics.jsonl"))
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


def test_a_run_with_refill_goes_on_exactly(filled: Path, tmp_path: Path) -> None:
    """Broken off at step 5, with its last checkpoint at step 4."""
    with pytest.raises(RuntimeError, match="broken off"):
        run(half(tmp_path, refill=2), "broken", Quiet(fail_at=5))
    assert RunFolder(tmp_path / "broken").checkpoints()[-1].name == "step-000004"
    go_on(tmp_path / "broken", Half)
    assert_same_run(filled, tmp_path / "broken")


def test_no_more_tasks_are_spent_where_nothing_can_be_scored(tmp_path: Path) -> None:
    played: set[str] = set()

    class Broken(Parity):
        def reward(self, episode: Any) -> float:
            played.add(episode.task.id)
            raise RuntimeError("no score today")

    with pytest.raises(ValueError, match="no score today"):
        run(half(tmp_path, refill=3), "a", environment=Broken)
    assert len(played) == 2


class Dull(Parity):
    def reward(self, episode: Any) -> float:
        return 1.0


def test_equal_rewards_are_an_empty_step(tmp_path: Path) -> None:
    """Not even the decay of the weights moves them; versions count such steps too."""
    training = {"max_steps": 2, "batch_size": 2, "weight_decay": 0.5}
    config = small(tmp_path, training=training, logging={"checkpoint_every": 1})
    folder = run(config, "a", environment=Dull)
    assert all(row["rows"] == row["trained_tokens"] == 0 for row in rows(folder / "metrics.jsonl"))
    one, other = (folder / "checkpoints").glob("step-*/model.safetensors")
    assert one.read_bytes() == other.read_bytes()
    sampled = load_trajectories(folder / "trajectories.jsonl")
    versions = {
        (t.group.partition("/")[0], turn.completion.policy_version) for t in sampled for turn in t.turns
    }
    assert versions == {("0", 0), ("1", 1)}


VARIANTS: dict[str, dict[str, Any]] = {
    "reinforce++": {"advantage": "reinforce_plus_plus", "entropy": 0.01},
    "gspo": {"advantage": "rloo", "ratio": "sequence", "normalization": "sequence", "clip_low": 3e-3},
    "cispo": {"loss_kind": "cispo", "clip_high": 4.0, "kl": 0.01, "kl_estimator": "k2"},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains(tmp_path: Path, name: str) -> None:
    """Two passes in mini-batches: the ratio is 1 in the first update only."""
    training = {"max_steps": 1, "update_epochs": 2, "minibatches": 3}
    if name == "reinforce++":
        training["group_size"] = 1  # compared with the whole step
    weighted = {"importance_cap": 2.0 if name == "cispo" else None}
    config = small(tmp_path, training=training, grpo=VARIANTS[name], optimization=weighted)
    metrics = rows(run(config, "a", environment=Parity) / "metrics.jsonl")
    assert all(row["skipped"] == 0 and row["grad_norm"] > 0 and row["logprob_diff"] > 1e-6 for row in metrics)
    found = [key in metrics[0] for key in ("kl", "importance_weight", "mismatch")]
    assert found == [name == "cispo"] * 3


def test_success_rises_from_the_warm_start(warm: Path, tmp_path: Path) -> None:
    before, after, report = lift(warm, tmp_path, training={"max_steps": 4}, data={"heldout_count": 64})
    print(
        f"success {before:.2f} -> {after:.2f}, rewards {[round(row['reward'], 2) for row in report.rows[1:]]}"
    )
    assert after - before >= 0.3
    assert report.rows[-1]["reward"] > report.rows[1]["reward"]
