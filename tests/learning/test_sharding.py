"""A learner whose weights are divided among real processes learns what one process learns: gradients, weights, figures,
checkpoints, published weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.kits.algorithm import distance
from tests.kits.forks import FORKED
from tests.kits.learner import Gradients, ragged_rows
from tests.kits.sharded import CASES, SAVED, Found, forked, go_on, make_case, torchrun, train_case
from TrainingFactory.assembly.learner import check_sharded
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.sharding import ShardedProcesses, sum_round_tokens

pytestmark = FORKED
QUICK = ["grpo", "ppo-critic+", "ppo-critic>", "lora+", "router-aux-loss"]
WRITTEN = [name for name in QUICK if name.endswith("+")]
FAR = 1e-5
# In bfloat16 other packs are rounded otherwise, and Adam makes as much of a small gradient as of a large one: how far
# all of them may be from those of one process, relative to their length. In one process, packs of 80 to 180 tokens are
# up to 0.032 and 0.0003 away from those of 250.
HALVES = ("bf16", "lora-bf16")
HALF_FAR = {"gradient/": 0.05, "weight/": 5e-4}


@cache
def alone(name: str, folder: Path | None = None) -> Found:
    """What one process finds; with its files in a folder."""
    return train_case(CASES[name], folder=folder)


def started(folder: Path, count: int, names: Sequence[str]) -> Path:
    """Let processes train these cases, after one process has written the checkpoints that they go on from."""
    for name in WRITTEN:
        (folder / f"{name[:-1]}-others").mkdir()
        alone(name[:-1], folder / f"{name[:-1]}-others")
    forked(count, folder, names)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes made, started once for all tests."""
    return started(tmp_path_factory.mktemp("pair"), 2, QUICK)


def assert_as_one_process(folder: Path, name: str, count: int) -> None:
    kind, case = ("others" if name.endswith(">") else "own"), name.rstrip("+>")
    others = folder / f"{case}-others"
    wanted, figures = alone(case, others if others.exists() else None)
    found = load_file(folder / case / f"{kind}.safetensors")
    assert found.keys() == {each for each in wanted if kind == "own" or each.startswith("weight/")}
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}  # trained, whatever the model is in
    assert_same_tensors(found, wanted, case)
    ranks = [json.loads((folder / case / f"{kind}-{rank}.json").read_text()) for rank in range(count)]
    assert all(each == ranks[0] for each in ranks)
    assert_same_figures(
        ranks[0], figures[SAVED : SAVED + 4] if kind == "others" else figures[: len(ranks[0])], case
    )


def assert_same_tensors(found: Gradients, wanted: Gradients, case: str) -> None:
    for kind, far in HALF_FAR.items() if case in HALVES else ():
        ours = {name: tensor for name, tensor in found.items() if name.startswith(kind)}
        assert not ours or distance(ours, {name: wanted[name] for name in ours}) < far
    for name, tensor in found.items() if case not in HALVES else ():
        torch.testing.assert_close(tensor, wanted[name], rtol=FAR, atol=FAR, msg=name)


def assert_same_figures(found: Any, wanted: Any, case: str) -> None:
    if isinstance(wanted, dict):
        by_packs = {"computed_tokens", "split_episodes"}  # packs of a step may be smaller
        assert found.keys() - by_packs == wanted.keys() - by_packs
        for name in wanted.keys() - by_packs:
            assert_same_figures(found[name], wanted[name], case)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_same_figures(ours, theirs, case)
    elif isinstance(wanted, float):
        rel, far = (0.1, 0.1) if case in HALVES else (1e-4, FAR)
        assert found == pytest.approx(wanted, rel=rel, abs=far)
    else:
        assert found == wanted


@pytest.mark.parametrize("name", QUICK)
def test_two_processes_learn_what_one_does(pair: Path, name: str) -> None:
    assert_as_one_process(pair, name, 2)


def test_the_steps_say_something() -> None:
    """So that the comparisons do: weights move, a share is empty, gradients are clipped."""
    weights, figures = alone("sft")
    assert [step["rows"] for step in figures[:5]] == [13, 4, 0, 1, 9]
    assert all(step.get("grad_norm", 1) > 0.5 for step in figures[:5])
    before = make_case(CASES["sft"]).model.model.norm.weight
    assert float((weights["weight/model.norm.weight"] - before.detach()).abs().max()) > 2e-4


def test_all_processes_hear_of_a_checkpoint_that_the_first_cannot_write(pair: Path) -> None:
    texts = [(pair / f"failed-{rank}.txt").read_text() for rank in range(2)]
    assert "Could not write" in texts[0] and texts[0] == texts[1]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"training": {"optimizer": "adamw_8bit"}},
            "training.optimizer is adamw_8bit, which .* use adamw or muon",
        ),
        ({"model": {"quantization": "4bit"}}, "model.quantization is 4bit, which .* use none"),
    ],
)
def test_what_cannot_be_divided_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_sharded(TrainingConfig(**given))


def test_packs_are_made_for_all_processes() -> None:
    """In rounds of one pack for each, of like size, and nothing is lost."""
    rows = [row for seed in range(6) for row in ragged_rows(seed)]
    one = make_batch(rows, 3000)
    every = sorted(number for each in one.packs for number in each.rows)
    for shares in (2, 3, 5):
        processes = ShardedProcesses.__new__(ShardedProcesses)
        processes.world_size = shares
        batch = processes.pack_batch(lambda budget: make_batch(rows, budget), 3000)
        assert sorted(number for each in batch.packs for number in each.rows) == every
        assert (batch.num_rows, batch.num_tokens) == (one.num_rows, one.num_tokens)
        assert batch.num_episodes == one.num_episodes
        ideal = sum(len(each.token_ids) for each in one.packs) / shares
        assert sum_round_tokens(batch.packs, shares) < 1.6 * ideal
        assert sum_round_tokens(batch.packs, shares) <= sum_round_tokens(one.packs, shares)


@pytest.mark.parametrize("name", [name[:-1] for name in WRITTEN])
def test_a_checkpoint_of_two_is_one_of_any_number(pair: Path, name: str) -> None:
    here, there = pair / f"{name}-others", pair / name
    assert_same_files(there / "checkpoint", here / "checkpoint", name)
    for kind in ("published-True", "published-False"):
        assert_same_files(there / kind, here / kind, name)
    weights, figures = go_on(CASES[name], there)
    wanted, steps = alone(name, here)
    assert_same_tensors(weights, wanted, name)
    assert_same_figures(figures, steps[SAVED : SAVED + 4], name)


def assert_same_files(found: Path, wanted: Path, case: str) -> None:
    names = sorted(str(path.relative_to(wanted)) for path in wanted.rglob("*") if path.is_file())
    assert names and names == sorted(
        str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()
    )
    for name in names:
        if name.endswith(".safetensors"):
            ours, theirs = load_file(found / name), load_file(wanted / name)
            assert ours.keys() == theirs.keys()
            for each, tensor in theirs.items():
                atol = 0.02 if tensor.dtype == torch.bfloat16 else 1e-3 if case in HALVES else FAR
                torch.testing.assert_close(ours[each], tensor, rtol=1e-4, atol=atol, msg=each)
        elif name != "SHA256SUMS":
            ours, theirs = (
                (folder / name).read_text().replace(",", "").splitlines() for folder in (found, wanted)
            )
            assert sorted(ours) == sorted(theirs), name  # PEFT writes sets


@pytest.mark.slow
def test_two_processes_and_every_case(tmp_path: Path) -> None:
    names = [name for name in CASES if not {name, f"{name}+"} & {*QUICK}]
    done = torchrun(2, "tests.kits.sharded", tmp_path, *names)
    assert done.returncode == 0, done.stderr[-6000:]
    for name in names:
        assert_as_one_process(tmp_path, name, 2)


@pytest.mark.slow
def test_three_processes_and_every_case(pair: Path, tmp_path: Path) -> None:
    """Three go on from the checkpoints of two, too."""
    names = [*(f"{name[:-1]}>" for name in WRITTEN), *(name for name in CASES if f"{name}+" not in WRITTEN)]
    for name in WRITTEN:
        (tmp_path / f"{name[:-1]}-others").symlink_to(pair / name[:-1])
    done = torchrun(3, "tests.kits.sharded", tmp_path, *names)
    assert done.returncode == 0, done.stderr[-6000:]
    for name in WRITTEN:
        (tmp_path / f"{name[:-1]}-others").unlink()
    for name in names:
        assert_as_one_process(tmp_path, name, 3)
