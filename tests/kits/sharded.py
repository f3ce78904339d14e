"""A learner in one process or in several: `torchrun --nproc-per-node 2 -m tests.kits.sharded FOLDER CASE ...` trains
every case and writes what it found, which a test compares with what one process finds. `forked` does it without a
launcher and its imports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from tests.kits.algorithm import ALGORITHMS, groups_of, learner_for
from tests.kits.engine import tiny
from tests.kits.forks import fork
from tests.kits.learner import moved, samples_of
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.learning.checkpoints import load_checkpoint, save_checkpoint
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.lora import add_lora
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.processes import Processes
from TrainingFactory.learning.publishing import Publisher
from TrainingFactory.learning.sharding import ShardedProcesses
from TrainingFactory.learning.step import StepOptions, evaluate_rows, score_rows, train_step
from TrainingFactory.models import load_model
from TrainingFactory.types import Sample

ROOT = Path(__file__).parents[2]
SAVED = 3  # steps before the checkpoint
Found = tuple[dict[str, torch.Tensor], list[Any]]
SMALL = StepOptions(token_budget=250)
HALVES = StepOptions(token_budget=250, minibatches=2)


@dataclass(slots=True, frozen=True)
class Case:
    algorithm: Any
    options: dict[str, Any] = field(default_factory=dict)  # of a learner
    step: StepOptions = SMALL
    kind: str = "gqa_tied"
    lora: dict[str, Any] | None = None  # options of an adapter
    saved: bool = False  # the adapter has a head of its own
    rows: bool = False  # a layer does not run over a tree
    dtype: torch.dtype = torch.float32
    optimizer: Any = "adamw"
    groups: int = 4


CASES = {
    "grpo": Case(GRPO()),
    "grpo-kl": Case(GRPO(kl=0.1, advantage="reinforce_plus_plus_baseline", entropy=0.01)),
    "ppo-head": Case(PPO(kl=0.1), step=StepOptions(token_budget=250, epochs=2)),
    "ppo-critic": Case(PPO(critic="separate", critic_warmup=1, kl=0.1, kl_in="reward"), step=HALVES),
    "dpo": Case(ALGORITHMS["dpo"]),
    "kto": Case(ALGORITHMS["kto"]),
    "sft": Case(ALGORITHMS["sft"], kind="gqa_bias"),
    "reward-model": Case(ALGORITHMS["reward-model"], kind="gqa_bias"),
    "lora": Case(GRPO(kl=0.1), lora={}),
    "dora": Case(GRPO(kl=0.1), lora={"dora": True}),
    "saved": Case(GRPO(), lora={}, saved=True, kind="gqa_bias"),
    "rows": Case(GRPO(), rows=True),
    "checkpointing": Case(GRPO(), {"gradient_checkpointing": True}),
    "bf16": Case(GRPO(), dtype=torch.bfloat16, groups=2),  # slow on a CPU
    # Without clipping: a token whose rounded ratio is on the other side of the limit changes the gradient by 12 %.
    "lora-bf16": Case(GRPO(kl=0.1, clip_low=10.0, clip_high=10.0), lora={}, dtype=torch.bfloat16, groups=2),
    "muon": Case(GRPO(), optimizer="muon"),
    "experts": Case(GRPO(), kind="mla_moe"),
    "router-aux-loss": Case(GRPO(), {"router_aux_loss": 0.1}, kind="moe"),
}


def refuse_trees(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("tfactory_tree") is not None:
        raise NotImplementedError


def make_case(case: Case, processes: Processes | None = None) -> Learner:
    model = moved(tiny(case.kind), 3).to(case.dtype)
    if case.saved:
        torch.manual_seed(0)
        given = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])
        model = moved(get_peft_model(model, given), 5)
        for name, param in model.named_parameters():  # as for an adapter that was loaded
            param.requires_grad_("lora_" in name)
    elif case.lora is not None:
        model = moved(add_lora(model, r=4, **case.lora), 5)
    if case.rows:
        model.model.layers[1].register_forward_pre_hook(refuse_trees, with_kwargs=True)
    options = dict(case.options)
    needs = case.algorithm.needs
    if "reference" in needs and case.lora is None:
        options["reference"] = tiny(case.kind).to(case.dtype).eval()  # pyright: ignore[reportArgumentType]
    made = OptimizerOptions(case.optimizer, learning_rate=1e-4, max_grad_norm=0.5)
    return learner_for(case.algorithm, model, processes=processes, optimizer=made, **options)


def steps_of(case: Case) -> list[list[Sample]]:
    """The rows of five steps: many, few, none, one pack alone, many."""
    rows = [samples_of(case.algorithm, [group]) for group in groups_of()[: case.groups]]
    every = [row for group in rows for row in group]
    alone = [row for row in rows[1] if row.pair == rows[1][0].pair]
    return [every, rows[0], [], alone, [row for group in rows[1:] for row in group]]


def whole(learner: Learner, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: learner.processes.gather(tensor.detach()).clone() for name, tensor in tensors.items()}


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return dict(zip(learner._weights.names, learner._weights.masters, strict=True))


def train_case(case: Case, processes: Processes | None = None, folder: Path | None = None) -> Found:
    """Return the first gradients and the weights after five steps, and all figures. With a folder there is a checkpoint
    after three steps in it, and what is published at the end."""
    learner, found, figures = make_case(case, processes), dict[str, torch.Tensor](), list[Any]()

    def keep() -> float:
        got = {
            f"gradient/{name}": each.grad for name, each in weights(learner).items() if each.grad is not None
        }
        found.update({} if found else whole(learner, got))
        return Learner._step_optimizers(learner)

    learner._step_optimizers = keep  # pyright: ignore[reportAttributeAccessIssue]
    rows = steps_of(case)
    for number in range(SAVED):
        figures.append(train_step(learner, case.algorithm, rows[number], number, case.step))
    if folder is not None:
        save_checkpoint(folder / "checkpoint", learner, tokenizer(), {"step": SAVED})
    figures += finish(case, learner)
    if folder is not None:
        figures += [published(learner, folder / "published", adapters) for adapters in (True, False)]
    found.update({f"weight/{name}": value for name, value in whole(learner, weights(learner)).items()})
    return found, figures


def go_on(case: Case, folder: Path, processes: Processes | None = None) -> Found:
    """Return what `train_case` does, of a learner that was loaded from its checkpoint."""
    learner = make_case(case, processes)
    assert load_checkpoint(folder / "checkpoint", learner) == {"step": SAVED} and learner.steps > 0
    figures = finish(case, learner)
    return {f"weight/{name}": value for name, value in whole(learner, weights(learner)).items()}, figures


def finish(case: Case, learner: Learner) -> list[Any]:
    """Train the last steps; return their figures, those of an evaluation, and the log-probs of rows."""
    rows = steps_of(case)
    found: list[Any] = [
        train_step(learner, case.algorithm, rows[number], number, case.step)
        for number in range(SAVED, len(rows))
    ]
    found.append(evaluate_rows(learner, case.algorithm, rows[0], 5, case.step))
    return [*found, score_rows(learner, rows[0], case.step) if "scores" not in case.algorithm.needs else []]


def published(learner: Learner, folder: Path, adapters: bool) -> list[Any]:
    """Publish; return the kind and the canary's log-probs, with all files in a folder."""
    publisher = Publisher(learner, adapters)
    made = publisher.publish(5)
    if learner.processes.rank == 0:
        folder = folder.with_name(f"{folder.name}-{adapters}")
        shutil.copytree(made.folder, folder)
        shutil.copytree(publisher.model_folder, folder / "model")
    publisher.close()
    return [
        made.kind,
        made.version,
        publisher.dtype,
        publisher.adapter_rank,
        list(made.canary[1]) if made.canary else [],
    ]


@cache
def tokenizer() -> Any:
    return load_model("builtin:tiny", device="cpu").tokenizer


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


def forked(count: int, folder: Path, names: Sequence[str], timeout: float = 240) -> None:
    """Run them in processes that know of each other what a launcher says."""
    processes = [fork(_rank, rank, count, folder, names) for rank in range(count)]
    for process in processes:
        process.join(timeout)
        process.kill()
        process.join()
    said = [(folder / f"stderr-{rank}").read_text()[-6000:] for rank in range(count)]
    assert [process.exitcode for process in processes] == [0] * count, "\n".join(said)


def _rank(rank: int, count: int, folder: Path, names: Sequence[str]) -> None:
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
    }
    main(folder, names, f"file://{folder}/meet")


def main(folder: Path, names: Sequence[str], meet: str = "env://") -> None:
    """Train the cases; those that end in + with files, and those that end in > go on from the checkpoint of others."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count)
    torch.set_num_threads(1)
    for name in names:
        case, home = CASES[name.rstrip("+>")], folder / name.rstrip("+>")
        home.mkdir(exist_ok=True)
        processes = ShardedProcesses(torch.device("cpu"))
        if name.endswith(">"):
            found, figures = go_on(case, folder / f"{home.name}-others", processes)
        else:
            found, figures = train_case(case, processes, home if name.endswith("+") else None)
        kind = "others" if name.endswith(">") else "own"
        (home / f"{kind}-{processes.rank}.json").write_text(json.dumps(figures))
        if processes.rank == 0:
            save_file(found, home / f"{kind}.safetensors")
    learner = make_case(CASES["sft"], ShardedProcesses(torch.device("cpu")))
    (folder / "file").touch()
    told = ""
    try:
        save_checkpoint(folder / "file" / "checkpoint", learner, tokenizer(), {})
    except OSError as error:
        told = str(error)
    (folder / f"failed-{dist.get_rank()}.txt").write_text(told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
