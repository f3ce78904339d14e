"""A learner in one process or in several: `torchrun --nproc-per-node 2 -m tests.kits.sharded FOLDER CASE ...` trains every
case and writes what it found, which a test compares with what one process finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.kits.algorithm import ALGORITHMS, groups_of, learner_for
from tests.kits.engine import tiny
from tests.kits.learner import moved, samples_of
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.processes import Processes
from TrainingFactory.learning.sharding import Sharded
from TrainingFactory.learning.step import StepOptions, evaluate_rows, score_rows, train_step
from TrainingFactory.types import Sample

ROOT = Path(__file__).parents[2]


@dataclass(slots=True, frozen=True)
class Case:
    algorithm: Any
    options: dict[str, Any] = field(default_factory=dict)  # of a learner
    step: StepOptions = StepOptions(token_budget=250)
    kind: str = "gqa_tied"
    lora: bool = False
    dtype: torch.dtype = torch.float32
    optimizer: Any = "adamw"


TWICE = StepOptions(token_budget=250, epochs=2, minibatches=2)
CASES = {
    "grpo": Case(GRPO()),
    "grpo-kl": Case(GRPO(kl=0.1, advantage="reinforce_plus_plus_baseline", entropy=0.01)),
    "ppo-head": Case(PPO(kl=0.1), step=TWICE),
    "ppo-critic": Case(PPO(critic="separate", critic_warmup=1, kl=0.1, kl_in="reward"), step=TWICE),
    "dpo": Case(ALGORITHMS["dpo"]),
    "kto": Case(ALGORITHMS["kto"]),
    "sft": Case(ALGORITHMS["sft"], kind="gqa_bias"),
    "reward-model": Case(ALGORITHMS["reward-model"], kind="gqa_bias"),
    "lora": Case(GRPO(kl=0.1), lora=True),
    "checkpointing": Case(GRPO(), {"gradient_checkpointing": True}),
    "bf16": Case(GRPO(), dtype=torch.bfloat16),
    "lora-bf16": Case(GRPO(kl=0.1), lora=True, dtype=torch.bfloat16),
    "muon": Case(GRPO(), optimizer="muon"),
    "experts": Case(GRPO(), kind="mla_moe"),
}


def make_case(case: Case, processes: Processes | None = None) -> Learner:
    model = moved(tiny(case.kind), 3).to(case.dtype)
    if case.lora:
        model = moved(add_lora(model, r=4), 5)
    options = dict(case.options)
    needs = case.algorithm.needs
    if "reference" in needs and not case.lora:
        options["reference"] = tiny(case.kind).to(case.dtype).eval()  # pyright: ignore[reportArgumentType]
    made = OptimizerOptions(case.optimizer, learning_rate=1e-3, max_grad_norm=0.5)
    return learner_for(case.algorithm, model, processes=processes, optimizer=made, **options)


def steps_of(case: Case) -> list[list[Sample]]:
    """The rows of five steps: many, few, none, one pack alone, many."""
    rows = [samples_of(case.algorithm, [group]) for group in groups_of()]
    every = [row for group in rows for row in group]
    alone = [row for row in rows[1] if row.pair == rows[1][0].pair]
    return [every, rows[0], [], alone, [row for group in rows[1:] for row in group]]


def whole(learner: Learner, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: learner.processes.whole(tensor.detach()).clone() for name, tensor in tensors.items()}


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return dict(zip(learner._weights.names, learner._weights.masters, strict=True))


def train_case(case: Case, processes: Processes | None = None) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return the first gradients, the weights after five steps, and all figures."""
    learner, found, step = make_case(case, processes), dict[str, torch.Tensor](), Learner._step
    figures: list[Any] = []

    def keep() -> float:
        got = {
            f"gradient/{name}": each.grad for name, each in weights(learner).items() if each.grad is not None
        }
        found.update({} if figures or found else whole(learner, got))
        return step(learner)

    learner._step = keep  # pyright: ignore[reportAttributeAccessIssue]
    for number, rows in enumerate(steps_of(case)):
        figures.append(train_step(learner, case.algorithm, rows, number, case.step))
    rows = steps_of(case)[0]
    figures.append(evaluate_rows(learner, case.algorithm, rows, 5, case.step))
    figures.append(score_rows(learner, rows, case.step) if "scores" not in case.algorithm.needs else [])
    found.update({f"weight/{name}": value for name, value in whole(learner, weights(learner)).items()})
    return found, figures


def torchrun(
    count: int, module: str, *arguments: Any, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a module in processes by the real launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, "-m", module, *map(str, arguments)], cwd=ROOT, env=os.environ | quiet, timeout=timeout,
        capture_output=True, text=True,
    )  # fmt: skip


def main(folder: Path, names: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    for name in names:
        found, figures = train_case(CASES[name], Sharded(torch.device("cpu")))
        (folder / f"{name}-{rank}.json").write_text(json.dumps(figures))
        if rank == 0:
            save_file(found, folder / f"{name}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
