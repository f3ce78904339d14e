"""One training step: from rows to changed weights. Everything a step does to the model is here, top to bottom."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from TrainingFactory.common.seeds import turn_seed
from TrainingFactory.data.packing import Batch, make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.protocols import Algorithm
from TrainingFactory.types import Sample

COUNTS = ("trained_tokens", "rows", "trained_episodes", "pairs", "row_tokens", "computed_tokens", "skipped")


@dataclass(slots=True, frozen=True)
class StepOptions:
    """`epochs` passes over the rows of a step, each in `minibatches` updates."""

    token_budget: int = 16_384
    epochs: int = 1
    minibatches: int = 1
    seed: int = 0


def train_step(
    learner: Learner, algorithm: Algorithm, rows: Sequence[Sample], step: int, options: StepOptions
) -> dict[str, float]:
    """Pack the rows, annotate them, let the algorithm prepare them, and update the weights. Dropout and the order of
    mini-batches are keyed by the step, so that a resumed run does the same."""
    seed = turn_seed(options.seed, step, "update", 0, 0)
    torch.manual_seed(seed + learner.processes.rank)
    parts = split(rows, options.minibatches, seed)
    batches = [_annotated(learner, algorithm.needs, part, options.token_budget) for part in parts]
    algorithm.prepare(batches, step)
    measured = mismatch(batches, step) if "old" in algorithm.needs else {}
    updates = [learner.update(batch, algorithm.loss, algorithm.needs) for batch in batches * options.epochs]
    return merged(updates) | measured


def mismatch(batches: Sequence[Batch], step: int) -> dict[str, float]:
    """Measure how far the log-probs of who sampled are from the learner's own before the step: `mismatch` over the
    tokens of the weights that are trained, where only the computing differs, and `staleness_gap` over those of older
    ones. What there is no token for is left out."""
    packs = [pack for batch in batches for pack in batch.packs if pack.old is not None]
    gaps = np.concatenate([np.zeros(0), *(np.abs(pack.old - pack.logprobs) for pack in packs)])
    fresh = np.concatenate([np.zeros(0, bool), *(pack.versions == step for pack in packs)])
    found: dict[str, float] = {}
    for name, chosen in (("mismatch", gaps[fresh]), ("staleness_gap", gaps[~fresh])):
        if len(chosen):
            found[name] = float(chosen.mean())
    if fresh.any():
        found["mismatch_max"] = float(gaps[fresh].max())
    return found


def evaluate_rows(
    learner: Learner, algorithm: Algorithm, rows: Sequence[Sample], step: int, options: StepOptions
) -> dict[str, float]:
    """Measure the loss of the rows, and what else it tells, without an update."""
    batch = _annotated(learner, algorithm.needs, rows, options.token_budget)
    algorithm.prepare([batch], step)
    return algorithm.evaluated(learner.evaluate(batch, algorithm.loss, algorithm.needs))


def score_rows(learner: Learner, rows: Sequence[Sample], options: StepOptions) -> list[list[float]]:
    """Return the log-probs of the trained tokens of each row by the weights as they are; 0 for other tokens."""
    batch = _annotated(learner, frozenset({"old"}), rows, options.token_budget)
    found = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    for pack in batch.packs:
        assert pack.old is not None
        for number in pack.rows:
            found[number][rows[number].loss_mask] = pack.old[pack.row == number]
    return [values.tolist() for values in found]


def _annotated(learner: Learner, needs: frozenset[str], rows: Sequence[Sample], token_budget: int) -> Batch:
    def packed(budget: int) -> Batch:
        return make_batch(rows, budget, learner.sharing, "mismatched" in needs, learner.below)

    return learner.annotate(learner.processes.packed(packed, token_budget), needs)


def split(samples: Sequence[Sample], parts: int, seed: int = 0) -> list[list[Sample]]:
    """Deal the rows out at random into parts with about as many episodes; what belongs together stays together."""
    if parts == 1:
        return [list(samples)]
    units: dict[int, list[Sample]] = {}
    for sample in samples:
        units.setdefault(sample.pair, []).append(sample)
    shuffled = list(units.values())
    random.Random(seed).shuffle(shuffled)
    return [[sample for unit in shuffled[part::parts] for sample in unit] for part in range(parts)]


def merged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Add counts up over the updates of a step; the rest are means over those updates that have it."""
    if len(updates) == 1:
        return updates[0]
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for row in updates for name in row):
        values = [row[name] for row in updates if name in row]
        found[name] = sum(values) if name in COUNTS else sum(values) / len(values)
    return found
