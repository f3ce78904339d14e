"""A run that was stopped, however roughly, goes on as if nothing had happened."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.forks import FORKED, fork
from tests.kits.run import Parity, Quiet, assert_same_run, brief, go_on, rows, train
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects


def in_process(folder: Path) -> None:
    """A process that starts the run, or goes on with it."""
    if folder.exists():
        go_on(folder)
    else:
        train(brief(folder.parent), folder.name)


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


# When to kill: each process lives until its condition holds, and a random moment longer.
MOMENTS: list[tuple[float, Callable[[Path], bool]]] = [
    (
        0.02,
        lambda run: any((run / "checkpoints").glob(".step-*.part")),
    ),  # while the first checkpoint is written
    (0.15, lambda run: lines(run) >= 3),  # between two checkpoints
]


def lived(folder: Path, longer: float, condition: Callable[[Path], bool]) -> int | None:
    """How a process ended that was killed so much longer after its condition held."""
    process = fork(in_process, folder)
    while process.is_alive() and not condition(folder):
        time.sleep(0.002)
    process.join(longer)
    process.kill()
    process.join()
    return process.exitcode


@FORKED
def test_kill_9_at_any_moment(whole: Path, tmp_path: Path) -> None:
    rng, broken = random.Random(0), tmp_path / "broken"
    ends = [lived(broken, rng.random() * longer, condition) for longer, condition in MOMENTS]
    assert -9 in ends and lived(broken, 300, lambda run: False) == 0
    assert_same_run(whole, broken)
    taken = [task for row in rows(broken / "consumed.jsonl") for task in row["tasks"]]
    # 7 tasks in batches of 3: a whole epoch of three steps, then one more step
    assert len(set(taken[:7])) == 7 and len(taken) == 10
    assert [path.name for path in RunFolder(broken).checkpoints()] == ["step-000002", "step-000004"]
    assert not list((broken / "checkpoints").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_kill_9_at_fifty_random_moments(whole: Path, tmp_path: Path, seed: int) -> None:
    rng, broken = random.Random(seed), tmp_path / "broken"
    begun = Path.exists if seed % 10 else (lambda run: True)  # every tenth in the set-up, too
    for _ in range(1 + seed % 3):
        lived(broken, rng.random() * 3, begun)
    assert lived(broken, 300, lambda run: False) == 0
    assert_same_run(whole, broken)


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "adapter": {"lora": {"enabled": True, "r": 4, "dropout": 0.1}},
    "muon": {"training": {"optimizer": "muon", "schedule": "cosine", "warmup_steps": 2}},
    "kl": {"grpo": {"kl": 0.1}, "training": {"eval_every": 3}, "data": {"heldout_count": 2}},
    "sft": {"training": {"algorithm": "sft"}},
}
# Whatever of either is not restored shows in both together.
VARIANTS["muon and kl"] = VARIANTS["kl"] | {"training": VARIANTS["muon"]["training"] | {"eval_every": 3}}
ALONE = [pytest.param(name, marks=pytest.mark.slow) for name in ("muon", "kl")]


@pytest.mark.parametrize("variant", ["adapter", "sft", "muon and kl", *ALONE])
def test_every_way_to_train_goes_on_exactly(tmp_path: Path, variant: str) -> None:
    config = brief(tmp_path, **VARIANTS[variant])
    train(config, "whole")
    with pytest.raises(RuntimeError, match="broken off"):
        train(config, "broken", Quiet(fail_at=3))
    assert RunFolder(tmp_path / "broken").state == "failed"
    assert len(rows(tmp_path / "broken" / "consumed.jsonl")) == 3
    assert go_on(tmp_path / "broken").state == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_the_test_can_fail(whole: Path, tmp_path: Path) -> None:
    """Another seed is another run: the comparison is not blind."""
    train(brief(tmp_path, training={"seed": 1}), "b")
    with pytest.raises(AssertionError):
        assert_same_run(whole, tmp_path / "b")


def test_files_and_options_that_were_changed(whole: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(whole, tmp_path / "a"))
    before = run.metrics()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(before[0])[:20])
    assert run.metrics() == before  # half a line is no row
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace("batch_size: 3", "batch_size: 2"))
    with pytest.raises(ValueError, match=r"12 groups in 4 steps: training.batch_size cannot change"):
        go_on(run.path)
    config.write_text(config.read_text().replace("batch_size: 2", "batch_size: 3"))
    (run.path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics.jsonl has 0 bytes, but \d+"):
        go_on(run.path)


@pytest.mark.parametrize(
    "damage", [pytest.param("truncated", marks=pytest.mark.slow), "flipped", "missing", "truncated and old"]
)
def test_a_damaged_checkpoint_is_left_for_the_one_before(whole: Path, tmp_path: Path, damage: str) -> None:
    run, watcher = RunFolder(shutil.copytree(whole, tmp_path / "a")), Quiet()
    [first, last] = run.checkpoints()
    file = last / "learner" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-401::4] = bytes(byte ^ 0x40 for byte in data[-401::4])  # high bits of numbers
    file.write_bytes(data if damage == "flipped" else data[: len(data) // 2])
    if damage == "missing":
        file.unlink()
    if damage.endswith("old"):
        for each in (first, last):
            (each / "SHA256SUMS").unlink()
    (run.path / "checkpoints" / ".step-000006.part").mkdir()
    objects = UserObjects(environment=Parity)
    assert Training(run.config, run=run, objects=objects, watcher=watcher).train().state == "finished"
    [told] = [text for text in watcher.said if "WARNING" in text]
    assert (
        "step-000004" in told and "learner/state.safetensors" in told and "the previous one is used" in told
    )
    assert "resuming after step 2 of 4" in watcher.said
    assert_same_run(whole, run.path)
    assert sorted(path.name for path in (run.path / "checkpoints").iterdir()) == [first.name, last.name]
    for each in (first, last):
        (each / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoints of run a are damaged"):
        go_on(run.path)


def test_digests_are_those_that_others_compute(whole: Path) -> None:
    folder = RunFolder(whole).checkpoints()[-1]
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = {line.split(":")[0] for line in done.stdout.splitlines()}
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert listed == files - {"SHA256SUMS"}


def test_a_damaged_model_is_not_taken(whole: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(whole, tmp_path / "a"))
    [first, last] = run.checkpoints()
    (last / "config.json").write_text("{}")
    for name in ("a", str(last)):
        with pytest.raises(ValueError, match=rf"{last} is damaged: config.json.*{first}"):
            find_model(name, tmp_path)
    found = find_model(str(first))
    assert found.folder == first
