"""What one training step does to the weights, from its episodes on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from TrainingFactory.data.packing import make_batch
from TrainingFactory.protocols import Algorithm
from TrainingFactory.types import Sample, Trajectory

ADDED_UP = ("trained_tokens", "rows", "episodes", "pairs", "row_tokens", "computed_tokens", "skipped")


def learn(
    learner: Any,
    algorithm: Algorithm,
    groups: Sequence[Sequence[Trajectory]],
    step: int,
    *,
    token_budget: int,
    epochs: int = 1,
    minibatches: int = 1,
    seed: int = 0,
) -> dict[str, float]:
    """`epochs` passes over the episodes, each in `minibatches` steps of the optimiser. What the algorithm compares
    with (old log-probs, values, the reference) is computed before the first of them."""
    samples = [sample for group in groups for sample in algorithm.samples(group)]
    batches = [
        learner.annotate(make_batch(part, token_budget, learner.sharing), algorithm.needs)
        for part in split(samples, minibatches, seed)
    ]
    algorithm.prepare(batches, step)
    return together(
        [learner.update(batch, algorithm.loss, algorithm.needs) for _ in range(epochs) for batch in batches]
    )


def split(samples: Sequence[Sample], parts: int, seed: int = 0) -> list[list[Sample]]:
    """Parts of about equal numbers of episodes, in random order; what belongs together stays together. A part may be
    empty where there are fewer."""
    if parts == 1:
        return [list(samples)]
    units: dict[int, list[Sample]] = {}
    for sample in samples:
        units.setdefault(sample.pair, []).append(sample)
    shuffled = list(units.values())
    random.Random(seed).shuffle(shuffled)
    return [[sample for unit in shuffled[part::parts] for sample in unit] for part in range(parts)]


def together(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Counts added up over the updates of a step, the rest as means over those updates that have it."""
    if len(rows) == 1:
        return rows[0]
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        found = [row[name] for row in rows if name in row]
        merged[name] = sum(found) if name in ADDED_UP else sum(found) / len(found)
    return merged
