"""What dividing the weights (FSDP2) costs where there is nothing to divide: `python -m benchmarks.sharded` (GPU:
`--device cuda --real`).

The learner as it is in one process, the same once more, and the sharded one over one process, in turn: seconds of an
update, and how far their trained weights (in float32) are apart after all updates, relative to how far they moved.
`noise` is that distance between the two plain ones: kernels that add up in any order. `--real` is a random Qwen3 of
0.6 B parameters in bfloat16 with 16 groups of 8 rows, 768 + 256 tokens; else the built-in model. With `--offload` there
is a reference model as well, kept in the memory of the CPU by the sharded learner.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from benchmarks.update import make_model, make_rows
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.sharding import ShardedProcesses
from TrainingFactory.learning.step import StepOptions, train_step

SIDES = ("plain", "again", "sharded")
WARM_UP = 2


def make_side(name: str, args: argparse.Namespace) -> Learner:
    model = make_model(args.real, args.device)
    reference = copy.deepcopy(model).requires_grad_(False) if args.offload else None
    processes = ShardedProcesses(model.device, offloads_frozen=args.offload) if name == "sharded" else None
    for each in (model, reference) if processes is not None else ():  # as a run loads it
        _ = each is None or each.cpu()
    return Learner(
        model, OptimizerOptions(learning_rate=args.learning_rate), reference=reference, processes=processes,
        gradient_checkpointing=args.checkpointing,
    )  # fmt: skip


def trained(learner: Learner) -> list[torch.Tensor]:
    return [learner.processes.gather(weight.detach()).float().clone() for weight in learner._weights.masters]


def length(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    squares = (float((a - b).double().square().sum()) for a, b in zip(left, right, strict=True))
    return sum(squares) ** 0.5


def update(
    learner: Learner, rows: Any, step: int, args: argparse.Namespace
) -> tuple[float, dict[str, float]]:
    """Seconds, and metrics."""
    algorithm = GRPO(kl=0.01 if args.offload else 0.0)
    started = time.perf_counter()
    metrics = train_step(learner, algorithm, rows, step, StepOptions(args.token_budget))
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, metrics


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    args = parser.parse_args()
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    learners = {name: make_side(name, args) for name in SIDES}
    rows = make_rows(args.real, learners["plain"].causal_lm.config.get_text_config().vocab_size)
    before = trained(learners["plain"])
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    losses: dict[str, list[float]] = {name: [] for name in SIDES}
    for step in range(WARM_UP + args.updates):
        for name, learner in learners.items():
            took, metrics = update(learner, rows, step, args)
            seconds[name].append(took)
            losses[name].append(metrics["loss"])
        print(step, {name: round(seconds[name][-1], 4) for name in SIDES}, flush=True)
    plain, again, sharded = (trained(learner) for learner in learners.values())
    moved = length(plain, before)
    medians = {name: statistics.median(each[WARM_UP:]) for name, each in seconds.items()}
    least = {name: min(each[WARM_UP:]) for name, each in seconds.items()}
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": sum(weight.numel() for weight in plain),
        "updates": WARM_UP + args.updates,
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "cost": round(medians["sharded"] / medians["plain"] - 1, 4),
        "cost_of_least": round(least["sharded"] / least["plain"] - 1, 4),
        "apart": length(sharded, plain) / moved,
        "noise": length(again, plain) / moved,
        "largest": max(float((a - b).abs().max()) for a, b in zip(sharded, plain, strict=True)),
        "loss_apart": max(abs(a - b) for a, b in zip(losses["sharded"], losses["plain"], strict=True)),
    }
    print("RESULT " + json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
