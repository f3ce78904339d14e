"""What the tests of preference learning share: ragged tool dialogues, and TRL's losses over plain padded rows."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.kits.engine import tiny
from tests.kits.learner import Gradients, make_learner, moved, words
from tests.kits.warm import Homes, lift
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.learning.learner import Learner
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.rollout import play
from TrainingFactory.types import Completion, Message, Reward, Sample, Task, Trajectory, Turn

Group = list[Trajectory]


def dialogue(rng: random.Random, prompt: list[int], turns: int, reward: float | None) -> Trajectory:
    """Sampled turns with replies of tools in between, all of random length."""
    record, prompt = [], list(prompt)
    for _ in range(turns):
        ids = words(rng, rng.randrange(1, 12))
        record.append(Turn(list(prompt), Completion(ids, [-1.0] * len(ids), "stop"), Message("assistant")))
        prompt = prompt + ids + words(rng, rng.choice((1, 5, 30)))
    scored = None if reward is None else Reward(reward)
    return Trajectory(Task("t", "p"), "g", turns=record, reward=scored)


def random_prompt(rng: random.Random, head: list[int]) -> list[int]:
    return head + words(rng, rng.choice((2, 10, 40)))


def pair_groups(seed: int, count: int = 5) -> list[Group]:
    """Pairs with prompts of random length, the beginning of which all have in common."""
    rng = random.Random(seed)
    head, groups = words(rng, 30), []
    for _ in range(count):
        prompt, rewards = random_prompt(rng, head), rng.choice(((1.0, 0.0), (0.2, 0.7)))
        groups.append([dialogue(rng, prompt, rng.randrange(1, 4), reward) for reward in rewards])
    return groups


def moved_learner(seed: int = 0) -> tuple[Learner, Any]:
    """A learner whose model has moved away from its reference, and the reference."""
    frozen = tiny(seed=seed).eval()
    return make_learner(moved(tiny(seed=seed), seed), reference=frozen), frozen


def model_gradients(model: Any, loss: torch.Tensor) -> Gradients:
    model.zero_grad()
    loss.backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


# -- TRL


class PerToken(torch.nn.Module):
    """Stands where TRL expects a model with a fused head: log-probs by the plain model, rows padded."""

    is_gradient_checkpointing = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **_: Any
    ) -> Any:
        logits = self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        wanted, used = labels[:, 1:].clamp(min=0), labels[:, 1:] != -100
        chosen = logits.log_softmax(-1).gather(-1, wanted[..., None])[..., 0] * used
        zeros = torch.zeros_like(chosen)
        return SimpleNamespace(log_probs=chosen, entropy=zeros, mean_logits=zeros, is_top1=zeros > 1)


class Alone:
    """TRL's accelerator, of one process."""

    device = torch.device("cpu")

    def gather(self, value: Any) -> Any:
        return value

    gather_for_metrics = gather


def bare_trainer(kind: Any, model: Any, frozen: Any, **fields: Any) -> Any:
    """A trainer of TRL with what its loss reads, and nothing else."""
    trainer = kind.__new__(kind)
    trainer.__dict__ |= {
        "model": PerToken(model), "ref_model": PerToken(frozen), "accelerator": Alone(), "aux_loss_enabled": False,
        "precompute_ref_logps": False, "_metrics": {mode: defaultdict(list) for mode in ("train", "eval")},
        "_total_train_tokens": 0, "_tp_size": 1, "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
    } | fields  # fmt: skip
    return trainer


def padded(rows: list[Sample], prefix: str = "") -> dict[str, torch.Tensor]:
    size = max(len(row.token_ids) for row in rows)

    def table(values: list[Any]) -> torch.Tensor:
        return torch.tensor([[int(v) for v in row] + [0] * (size - len(row)) for row in values])

    return {
        f"{prefix}input_ids": table([row.token_ids for row in rows]),
        f"{prefix}attention_mask": table([[1] * len(row.token_ids) for row in rows]),
        f"{prefix}completion_mask": table([row.loss_mask for row in rows]),
    }


# -- a task with a tool


def write_episodes(path: Path, split: str, count: int) -> Path:
    """For each task of `Homes` two recorded episodes: one looks up and answers, the other guesses."""
    loaded = load_model("builtin:tiny")
    chat, rng = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids), random.Random(0)

    async def play_all() -> Group:
        found: Group = []
        for task in Homes.tasks(split, 3, count):
            good, bad = Homes(task), Homes(task)
            found += [await play(good, chat, good.expert()), await play(bad, chat, bad.novice(rng))]
        return found

    save_trajectories(path, asyncio.run(play_all()))
    return path


def lift_by_episodes(
    warm: Path, recorded: Path, folder: Path, **training: Any
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Learns from recorded lookups and guesses; by how much success on held-out tasks rose, and the first and the last
    evaluation on held-out episodes."""
    before, after, report = lift(
        warm, folder,
        training={"learning_rate": 3e-4, "warmup_steps": 0} | training,
        data={"dataset": str(recorded / "train.jsonl"), "heldout": str(recorded / "heldout.jsonl")},
    )  # fmt: skip
    start, *_, end = [row for row in report.rows if "eval/accuracy" in row]
    return after - before, start, end
