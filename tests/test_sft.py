"""Supervised fine-tuning: the value of the loss, and that it learns."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.engine_kit import tiny
from tests.learner_kit import make_learner, sample, words
from tests.test_grpo import group_of
from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions


def test_every_episode_is_a_row_whatever_it_earned() -> None:
    group = group_of(1.0, None, 0.0)
    assert SFT().samples(group) == [row for episode in group for row in to_samples(episode)]
    assert SFT().needs == frozenset()


def test_the_loss_is_the_cross_entropy_of_the_sampled_tokens() -> None:
    """Against transformers' own loss: labels of -100 where nothing is trained, mean over the rest."""
    model, rng = tiny().eval(), random.Random(0)
    head = words(rng, 55)
    rows = [sample(rng, head + words(rng, 5 + 4 * n), 40) for n in range(4)]
    size = max(len(row.token_ids) for row in rows)
    ids = torch.zeros(4, size, dtype=torch.long)
    labels = torch.full((4, size), -100)
    for number, row in enumerate(rows):
        ids[number, : len(row.token_ids)] = torch.tensor(row.token_ids)
        trained = [t if m else -100 for t, m in zip(row.token_ids, row.loss_mask, strict=True)]
        labels[number, : len(row.token_ids)] = torch.tensor(trained)
    logits = model(ids).logits
    wanted = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()
    learner, batch = make_learner(model), make_batch(rows, 70)
    assert len(batch.packs) > 1
    assert learner.evaluate(batch, SFT().loss)["loss"] == pytest.approx(wanted, rel=1e-5)
    assert learner.update(batch, SFT().loss)["loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_learns_by_heart(optimizer: str) -> None:
    rng = random.Random(0)
    head = words(rng, 50)
    batch = make_batch([sample(rng, head + words(rng, 12), 50) for _ in range(4)])
    options = OptimizerOptions(optimizer, learning_rate=1e-2, matrix_learning_rate=0.02)  # pyright: ignore[reportArgumentType]
    learner = Learner(tiny(), options)
    losses = [learner.update(batch, SFT().loss)["loss"] for _ in range(40)]
    assert losses[0] > 4 and losses[-1] < 0.2
