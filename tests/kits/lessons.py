"""Learning tests: a warm start on scripted conversations, and the success of the run that starts from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.kits.run import Quiet
from TrainingFactory.config import TrainingConfig
from TrainingFactory.runs.folder import TrainingReport
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Message


def warm_start(folder: Path, conversations: Iterable[Sequence[Message]], batch_size: int, steps: int) -> str:
    """Train the built-in model on conversations; return the folder of the run."""
    lessons = folder / "lessons.jsonl"
    rows = [[{"role": message.role, "content": message.content} for message in row] for row in conversations]
    lessons.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    sft = {"algorithm": "sft", "optimizer": "muon", "learning_rate": 0.006, "batch_size": batch_size}
    config = TrainingConfig(
        training=sft | {"max_steps": steps},
        data={"dataset": str(lessons)},
        logging={"output_dir": str(folder)},
    )
    return str(Training(config, name="warm", watcher=Quiet()).train().run)


def learn(
    folder: Path,
    model: str,
    environment: dict[str, Any],
    steps: int,
    *,
    max_tokens: int = 6,
    of_class: type | None = None,
    **training: Any,
) -> TrainingReport:
    """Train with GRPO, by default in batches of 32 episodes with an evaluation before and after."""
    batch = {"batch_size": 4, "group_size": 8}
    rates = {"learning_rate": 6e-4, "warmup_steps": 2, "max_steps": steps, "eval_every": steps}
    config = TrainingConfig(
        model={"name": model},
        training=batch | rates | training,
        environment=environment,
        data={"count": 64, "heldout_count": 64},
        sampling={"max_tokens": max_tokens},
        logging={"output_dir": str(folder)},
    )
    return Training(config, name="run", objects=UserObjects(environment=of_class), watcher=Quiet()).train()


def evaluations(report: TrainingReport, name: str = "success") -> list[float]:
    """Return a figure of the held-out episodes before training and at each evaluation."""
    return [row[key] for row in report.rows if (key := f"eval/{name}") in row]
