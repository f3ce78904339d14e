"""Two real processes that train one model do what one process does with all rows, whatever the algorithm."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kits.algorithm import ALGORITHMS, distance, groups_of, learner_for, step_gradients
from tests.kits.engine import tiny
from tests.kits.forks import fork
from tests.kits.learner import Gradients, make_learner, ragged_rows, samples_of
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import mismatched
from TrainingFactory.learning.learner import Learner
from TrainingFactory.types import Sample

# Which rows each process has in each step: unequal shares, one process without rows, no rows at all.
NONE = slice(0, 0)
STEPS = [(slice(0, 7), slice(7, 12)), (slice(0, 5), NONE), (NONE, NONE), (slice(3, 4), slice(4, 12))]


def step_rows() -> list[Sample]:
    rows, rng = ragged_rows(0)[:12], random.Random(0)
    for row in rows:
        row.advantages = [rng.gauss(0, 1) if trained else 0.0 for trained in row.loss_mask]
    return rows


def train(shares: list[list[slice]], path: Path) -> list[dict[str, float]]:
    model, rows, algorithm = tiny(), step_rows(), GRPO()
    learner = make_learner(model)
    figures = [
        learner.update(make_batch([row for share in step for row in rows[share]], 300), algorithm.loss)
        for step in shares
    ]
    save_file({name: weight.detach().clone() for name, weight in model.named_parameters()}, path)
    return figures


# The groups of each process: unequal shares, and for those that look at the step as a whole, nothing on one side.
SHARES = {"unequal": (slice(0, 3), slice(3, 4)), "one-sided": (NONE, slice(0, 4))}
WHOLE = ("reinforce++-baseline", "ppo-head", "kto", "rft")
# Whatever else a loss adds, it is divided by one of the counts that these divide by.
EVERY = (*WHOLE, "grpo", "grpo-sequence", "ppo-warmup", "dpo", "process-reward-model")
CASES = [("unequal", name) for name in EVERY] + [("one-sided", name) for name in WHOLE]


@cache
def learner_of(name: str) -> Learner:
    return learner_for(ALGORITHMS[name])


def share_gradients(name: str, ranks: tuple[int, ...], shares: tuple[slice, ...]) -> Gradients:
    """Of one step with the shares of these ranks. Answers meet the prompts of the same process."""
    algorithm, groups = ALGORITHMS[name], groups_of()
    rows = [samples_of(algorithm, groups[shares[rank]]) for rank in ranks]
    answers = [answer for share in rows for answer in mismatched(share)]
    every = [row for share in rows for row in share]
    return step_gradients(learner_of(name), algorithm, every, 250, True, answers)


def in_process(rank: int, port: int, folder: Path, cases: Sequence[tuple[str, str]]) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    figures = train([[step[rank]] for step in STEPS], folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    for how, name in cases:
        save_file(share_gradients(name, (rank,), SHARES[how]), folder / f"{how}-{name}-{rank}.safetensors")
    torch.distributed.destroy_process_group()


def run_pair(folder: Path, cases: Sequence[tuple[str, str]]) -> Path:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = [fork(in_process, rank, port, folder, cases) for rank in range(2)]
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes made, started once for all tests."""
    return run_pair(tmp_path_factory.mktemp("pair"), CASES)


@pytest.mark.parametrize(("how", "name"), CASES)
def test_the_gradient_of_an_algorithm(pair: Path, how: str, name: str) -> None:
    wanted = share_gradients(name, (0, 1), SHARES[how])
    for rank in range(2):
        found = load_file(pair / f"{how}-{name}-{rank}.safetensors")
        assert distance(found, wanted) < 1e-5


@pytest.mark.slow
def test_the_gradient_of_every_algorithm(tmp_path: Path) -> None:
    run_pair(tmp_path, [("unequal", name) for name in ALGORITHMS])
    for name in ALGORITHMS:
        wanted = share_gradients(name, (0, 1), SHARES["unequal"])
        for rank in range(2):
            assert distance(load_file(tmp_path / f"unequal-{name}-{rank}.safetensors"), wanted) < 1e-5


def test_two_processes_are_one_learner(pair: Path, tmp_path: Path) -> None:
    whole = train([list(step) for step in STEPS], tmp_path / "whole.safetensors")
    wanted = load_file(tmp_path / "whole.safetensors")
    before = dict(tiny().named_parameters())
    for rank in range(2):
        found = load_file(pair / f"{rank}.safetensors")
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=2e-6, msg=name)
        for ours, theirs in zip(json.loads((pair / f"{rank}.json").read_text()), whole, strict=True):
            for name in ("loss", "grad_norm", "trained_tokens", "rows", "entropy"):
                assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-4, abs=1e-4), name
    moved = max(float((wanted[name] - weight.detach()).abs().max()) for name, weight in before.items())
    assert moved > 1e-3  # so that the comparison says something
