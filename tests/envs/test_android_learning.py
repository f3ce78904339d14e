"""Training on simulated Android devices, through a real adb client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kits.android import Phones, phones
from tests.kits.android_lessons import OPTIONS, RANDOM_SUCCESS, SYSTEM, write_lessons
from tests.kits.run import Quiet
from TrainingFactory.assembly.export import export
from TrainingFactory.config import TrainingConfig
from TrainingFactory.runs.folder import TrainingReport
from TrainingFactory.trainers.training_run import Training


def train(farm: Phones, folder: Path, name: str, **sections: dict[str, Any]) -> TrainingReport:
    environment = {"environment_id": "android", "options": farm.options | OPTIONS, "system_prompt": SYSTEM}
    given: dict[str, Any] = {
        "environment": environment | {"max_turns": 2},
        "sampling": {"max_tokens": 32},
        "logging": {"output_dir": str(folder), "record_tools": False, "save_trajectories": False},
    }
    for section, keys in sections.items():
        given[section] = given.get(section, {}) | keys
    return Training(TrainingConfig(**given), name=name, watcher=Quiet()).train()


def test_a_step_trains_on_episodes_of_two_devices(tmp_path: Path) -> None:
    training = {"algorithm": "grpo", "max_steps": 1, "batch_size": 1, "group_size": 4}
    with phones(2) as farm:
        report = train(farm, tmp_path, "run", training=training, sampling={"max_tokens": 4})
    [row] = report.rows
    assert (row["android/leases"], row["android/failures"], row["android/quarantined"]) == (4, 0, 0)
    assert row["reward"] == 0


@pytest.mark.slow
def test_the_builtin_model_learns_to_turn_wifi_on(tmp_path: Path) -> None:
    write_lessons(tmp_path / "lessons.jsonl", 60 * 16, mistakes=0.3)
    warm_start = {
        "algorithm": "sft", "optimizer": "muon", "learning_rate": 0.006, "schedule": "linear", "batch_size": 16,
        "max_steps": 60,
    }  # fmt: skip
    from_rewards = {
        "algorithm": "grpo",
        "learning_rate": 6e-4,
        "warmup_steps": 2,
        "batch_size": 4,
        "group_size": 8,
    }
    from_rewards |= {"max_steps": 8, "eval_every": 8}
    data = {"dataset": str(tmp_path / "lessons.jsonl"), "shuffle": False}
    with phones(4) as farm:
        warm = train(farm, tmp_path, "warm", training=warm_start, data=data)
        export(str(warm.run), tmp_path / "model")
        model = {"name": str(tmp_path / "model")}
        report = train(farm, tmp_path, "run", model=model, training=from_rewards, data={"heldout_count": 64})
    first, *_, last = [row["eval/success"] for row in report.rows if "eval/success" in row]
    print(f"success: random {RANDOM_SUCCESS:.2f}, warm start {first:.2f}, trained {last:.2f}")
    assert last >= RANDOM_SUCCESS + 0.3 and last > first
