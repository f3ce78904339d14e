"""A run that was stopped, however roughly, goes on as if nothing had happened."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.run import Quiet, assert_same_run, go_on, rows, small, train
from TrainingFactory.services.runs.folder import RunFolder

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = [
    "tests.kits.run",
    "TrainingFactory.learning.checkpoints",
    "TrainingFactory.sampling",
    "TrainingFactory.models.loading",
    "peft",
]


def in_process(folder: str, name: str) -> None:
    """A process that starts the run, or goes on with it."""
    path = Path(folder) / name
    if path.exists():
        go_on(path)
    else:
        train(small(Path(folder), training={"max_steps": 8}, logging={"keep_every": 4}), name)


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def writing_a_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob(".step-*.part"))


# When to kill: each process lives until its condition holds, and a random moment longer.
MOMENTS: list[tuple[str, Callable[[Path], bool]]] = [
    ("in the first steps, with no checkpoint", lambda run: lines(run) >= 1),
    ("while a checkpoint is written", writing_a_checkpoint),
    ("right after a checkpoint", lambda run: (run / "checkpoints" / "step-000004").exists()),
    ("between two checkpoints", lambda run: lines(run) >= 5),
    ("while a checkpoint is written", writing_a_checkpoint),
]


@pytest.mark.parametrize("seed", [0])
def test_kill_9_at_any_moment(tmp_path: Path, seed: int) -> None:
    FORKS.set_forkserver_preload(PRELOADED)
    whole = FORKS.Process(target=in_process, args=(str(tmp_path), "whole"))
    whole.start()
    whole.join(300)
    assert whole.exitcode == 0
    rng = random.Random(seed)
    killed = 0
    for when, condition in MOMENTS:
        process = FORKS.Process(target=in_process, args=(str(tmp_path), "broken"))
        process.start()
        while process.is_alive() and not condition(tmp_path / "broken"):
            time.sleep(0.0005)
        time.sleep(rng.random() * (0.02 if "checkpoint is" in when else 0.15))
        process.kill()
        process.join()
        killed += process.exitcode == -9
    assert killed >= 3
    last = FORKS.Process(target=in_process, args=(str(tmp_path), "broken"))
    last.start()
    last.join(300)
    assert last.exitcode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    taken = [task for row in rows(tmp_path / "broken" / "consumed.jsonl") for task in row["tasks"]]
    # 7 tasks in batches of 3: two whole epochs of three steps, then two more steps
    assert len(set(taken[:7])) == len(set(taken[7:14])) == 7 and len(taken) == 20
    assert taken[:7] != taken[7:14]
    assert [path.name for path in RunFolder(tmp_path / "broken").checkpoints()] == [
        "step-000004",
        "step-000006",
        "step-000008",
    ]
    assert not list((tmp_path / "broken" / "checkpoints").glob(".*"))


VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "adapter": {"lora": {"enabled": True, "r": 4, "dropout": 0.1}},
    "muon": {"training": {"optimizer": "muon", "schedule": "cosine", "warmup_steps": 2}},
    "kl": {"grpo": {"kl": 0.1}, "training": {"eval_every": 3}, "data": {"heldout_count": 5}},
    "sft": {"training": {"algorithm": "sft"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_to_train_goes_on_exactly(tmp_path: Path, variant: str) -> None:
    config = small(tmp_path, **VARIANTS[variant])
    train(config, "whole")
    with pytest.raises(RuntimeError, match="broken off"):
        train(config, "broken", Quiet(fail_at=5))
    assert RunFolder(tmp_path / "broken").state == "failed"
    assert len(rows(tmp_path / "broken" / "consumed.jsonl")) == 5
    assert go_on(tmp_path / "broken").state == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_the_test_can_fail(tmp_path: Path) -> None:
    """Another seed is another run: the comparison is not blind."""
    train(small(tmp_path), "a")
    train(small(tmp_path, training={"seed": 1}), "b")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_file_that_was_shortened_is_not_trusted(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        train(small(tmp_path), "a", Quiet(fail_at=5))
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics.jsonl has 0 bytes, its checkpoint knows of \d+"):
        go_on(tmp_path / "a")


def test_half_a_line_is_no_row(tmp_path: Path) -> None:
    train(small(tmp_path, training={"max_steps": 1}), "a")
    run = RunFolder(tmp_path / "a")
    before = run.metrics()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(before[0])[:20])
    assert run.metrics() == before
