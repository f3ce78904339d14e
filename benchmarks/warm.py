"""Warm starts of the built-in model for benchmarks: the episodes that are measured look like those of a real run.

`warm_run` is the SFT run of `tfactory demo` over other lessons; `warm_start` is some seconds of training on scripted
episodes, after which the model writes well-formed calls.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from TrainingFactory.apps.demo.demo import WARM_START
from TrainingFactory.apps.demo.lessons import Lessons
from TrainingFactory.config import load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.data.samples import to_samples
from TrainingFactory.models import chat_format
from TrainingFactory.models.tiny import make_tiny_tokenizer
from TrainingFactory.protocols import ChatFormat
from TrainingFactory.rollout import play
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import Sample, Task


def warm_run(environment: Any, tasks: Sequence[Task], lessons: Lessons, folder: str | Path) -> Path:
    """Teach the lessons in a run of that folder, and return its checkpoint. The tasks are demonstrated."""
    dataset = Path(folder, "lessons.jsonl")
    lessons.write(dataset, environment, chat_format(make_tiny_tokenizer()), tasks, random.Random(0))
    options = {"model.device": "cpu", "environment.environment_id": None, "data.dataset": str(dataset)}
    options["logging.output_dir"] = str(folder)
    config = load_config(WARM_START, [key_value(key, value) for key, value in options.items()])
    checkpoint = Training(config, name="warm").train().checkpoint
    assert checkpoint is not None
    return checkpoint


def expert_rows(environment: Any, chat: ChatFormat, count: int) -> list[Sample]:
    """One training row for each of `count` tasks, played by the environment's own expert."""

    async def everything() -> list[Sample]:
        rows = []
        for task in environment.tasks("train", 0, count):
            world = environment(task)
            rows += to_samples(await play(world, chat, world.expert()))
        return rows

    return asyncio.run(everything())


def warm_start(model: Any, rows: list[Sample], steps: int = 400, batch: int = 8, rate: float = 4e-3) -> float:
    """Cross-entropy on what the expert wrote; the loss of the last step."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    loss = torch.zeros(())
    model.train()
    for _ in range(steps):
        chosen = [rows[i] for i in torch.randint(len(rows), (batch,), generator=generator)]
        ids = pad_sequence([torch.tensor(row.token_ids) for row in chosen], batch_first=True)  # [batch, T]
        mask = pad_sequence([torch.tensor(row.loss_mask) for row in chosen], batch_first=True)
        hidden = model.model(ids, use_cache=False).last_hidden_state  # right padding needs no mask
        logits = model.lm_head(hidden[:, :-1][mask[:, 1:]])  # [trained tokens, V]
        loss = cross_entropy(logits, ids[:, 1:][mask[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    return loss.item()
