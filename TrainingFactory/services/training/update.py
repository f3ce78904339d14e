"""What one training step does to the weights, from its episodes on."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from TrainingFactory.algorithms.sft import SFT
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.references import References
from TrainingFactory.protocols import Algorithm
from TrainingFactory.services.training.demonstrations import Recordings
from TrainingFactory.types import Sample, Trajectory

TOLD_EVERY = 10.0  # seconds
ADDED_UP = ("trained_tokens", "rows", "trained_episodes", "pairs", "row_tokens", "computed_tokens", "skipped")


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
    references: References | None = None,
) -> dict[str, float]:
    """`epochs` passes over the episodes, each in `minibatches` steps of the optimiser. What the algorithm compares
    with (old log-probs, values, the reference) is computed before the first of them, unless `references` know it."""
    samples = [sample for group in groups for sample in algorithm.samples(group)]
    if references is not None:
        references.fill(samples)
    batches = [
        learner.annotate(
            make_batch(part, token_budget, learner.sharing, "mismatched" in algorithm.needs), algorithm.needs
        )
        for part in split(samples, minibatches, seed)
    ]
    algorithm.prepare(batches, step)
    return together(
        [learner.update(batch, algorithm.loss, algorithm.needs) for _ in range(epochs) for batch in batches]
    )


def evaluate(
    learner: Learner,
    algorithm: Algorithm,
    groups: Sequence[Sequence[Trajectory]],
    step: int,
    *,
    token_budget: int,
    references: References | None = None,
) -> dict[str, float]:
    """The loss of episodes and what else it tells, without a step; for demonstrations the perplexity too."""
    samples = [sample for group in groups for sample in algorithm.samples(group)]
    if references is not None:
        references.fill(samples)
    batch = make_batch(samples, token_budget, learner.sharing, "mismatched" in algorithm.needs)
    algorithm.prepare([learner.annotate(batch, algorithm.needs)], step)
    figures = learner.evaluate(batch, algorithm.loss, algorithm.needs)
    if isinstance(algorithm, SFT):
        figures["perplexity"] = math.exp(figures["loss"])  # of a token
    return figures


def precompute(
    learner: Learner,
    algorithm: Algorithm,
    recordings: Sequence[Recordings],
    batch_size: int,
    token_budget: int,
    say: Callable[[str], None] = lambda _: None,
) -> References:
    """What the reference makes of all there is to learn from and to evaluate on; the learner does without it from then
    on. To be called before a checkpoint is loaded: the model may be its own reference only until it is trained."""
    references, told = References(), time.monotonic()
    numbers = [(rows, number) for rows in recordings for number in range(len(rows))]
    for start in range(0, len(numbers), batch_size):
        groups = [rows.group(number) for rows, number in numbers[start : start + batch_size]]
        references.add(learner, [row for group in groups for row in algorithm.samples(group)], token_budget)
        if time.monotonic() - told > TOLD_EVERY:
            told = time.monotonic()
            say(f"log-probs of the reference model: {start + len(groups)} of {len(numbers)} examples")
    learner.reference = None
    return references


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
