"""Two real processes that train one model do what one process does with all rows."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.learner_kit import ragged_rows
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import load_model
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
    model = load_model("builtin:tiny", device="cpu").model
    learner = Learner(model, OptimizerOptions(learning_rate=1e-3))
    rows, algorithm = step_rows(), GRPO()
    figures = [
        learner.update(make_batch([row for share in step for row in rows[share]], 300), algorithm.loss)
        for step in shares
    ]
    save_file({name: weight.detach().clone() for name, weight in model.named_parameters()}, path)
    return figures


def in_process(rank: int, port: int, folder: Path) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    figures = train([[step[rank]] for step in STEPS], folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


def test_two_processes_are_one_learner(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=in_process, args=(rank, port, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    whole = train([list(step) for step in STEPS], tmp_path / "whole.safetensors")
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    wanted = load_file(tmp_path / "whole.safetensors")
    before = dict(load_model("builtin:tiny", device="cpu").model.named_parameters())
    for rank in range(2):
        found = load_file(tmp_path / f"{rank}.safetensors")
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=2e-6, msg=name)
        for ours, theirs in zip(json.loads((tmp_path / f"{rank}.json").read_text()), whole, strict=True):
            for name in ("loss", "grad_norm", "trained_tokens", "rows", "entropy"):
                assert abs(ours.get(name, 0) - theirs.get(name, 0)) <= 1e-4 * (
                    1 + abs(theirs.get(name, 0))
                ), name
    moved = max(float((wanted[name] - weight.detach()).abs().max()) for name, weight in before.items())
    assert moved > 1e-3  # so that the comparison says something
