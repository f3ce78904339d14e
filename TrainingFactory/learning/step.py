"""One training step, from rows to updated weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from TrainingFactory.common.seeds import derive_seed
from TrainingFactory.data.packing import Batch, make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.protocols import Algorithm
from TrainingFactory.types import Sample

COUNT_METRICS = (
    "trained_tokens", "rows", "trained_episodes", "pairs", "row_tokens", "computed_tokens", "skipped", "split_episodes"
)  # fmt: skip


@dataclass(slots=True, frozen=True)
class StepOptions:
    """Options of a training step. A step makes `epochs` passes over its rows, each in `minibatches` updates."""

    token_budget: int = 16_384
    epochs: int = 1
    minibatches: int = 1
    seed: int = 0


def train_step(
    learner: Learner, algorithm: Algorithm, rows: Sequence[Sample], step: int, options: StepOptions
) -> dict[str, float]:
    """Pack and annotate the rows, let the algorithm prepare them, and update the weights. Seeds of dropout and
    mini-batch order are derived from the step, so that a resumed run reproduces it."""
    seed = derive_seed(options.seed, step, "update", 0, 0)
    torch.manual_seed(seed + learner.processes.rank)
    minibatches = split_minibatches(rows, options.minibatches, seed)
    batches = [
        _make_annotated_batch(learner, algorithm.needs, minibatch, options.token_budget)
        for minibatch in minibatches
    ]
    algorithm.prepare(batches, step)
    mismatch_metrics = measure_mismatch(batches, step) if "old" in algorithm.needs else {}
    updates = [learner.update(batch, algorithm.loss, algorithm.needs) for batch in batches * options.epochs]
    return merge_metrics(updates) | mismatch_metrics | _measure_budget_excess(batches, options.token_budget)


def _measure_budget_excess(batches: Sequence[Batch], token_budget: int) -> dict[str, float]:
    """Return the tokens of the largest pack over the budget, if they exceed it."""
    max_pack_tokens = max((len(pack.token_ids) for batch in batches for pack in batch.packs), default=0)
    return {"budget_excess": max_pack_tokens / token_budget} if max_pack_tokens > token_budget else {}


def measure_mismatch(batches: Sequence[Batch], step: int) -> dict[str, float]:
    """Return the mean absolute difference between the sampler's log-probs and the learner's before the step: `mismatch`
    over tokens sampled by the current weights, where only the implementation differs, and `staleness_gap` over tokens
    of older weights. A metric without tokens is omitted."""
    packs = [pack for batch in batches for pack in batch.packs if pack.old is not None]
    gaps = np.concatenate([np.zeros(0), *(np.abs(pack.old - pack.logprobs) for pack in packs)])
    is_on_policy = np.concatenate([np.zeros(0, bool), *(pack.versions == step for pack in packs)])
    metrics: dict[str, float] = {}
    for name, token_gaps in (("mismatch", gaps[is_on_policy]), ("staleness_gap", gaps[~is_on_policy])):
        if len(token_gaps):
            metrics[name] = float(token_gaps.mean())
    if is_on_policy.any():
        metrics["mismatch_max"] = float(gaps[is_on_policy].max())
    return metrics


def evaluate_rows(
    learner: Learner, algorithm: Algorithm, rows: Sequence[Sample], step: int, options: StepOptions
) -> dict[str, float]:
    """Return the loss and its metrics over the rows, without an update."""
    batch = _make_annotated_batch(learner, algorithm.needs, rows, options.token_budget)
    algorithm.prepare([batch], step)
    return algorithm.evaluated(learner.evaluate(batch, algorithm.loss, algorithm.needs))


def score_rows(learner: Learner, rows: Sequence[Sample], options: StepOptions) -> list[list[float]]:
    """Return each row's log-probs of its trained tokens by the current weights; 0 for other tokens."""
    batch = _make_annotated_batch(learner, frozenset({"old", "lengths"}), rows, options.token_budget)
    logprobs = [np.zeros(len(row.token_ids), np.float32) for row in rows]
    for pack in batch.packs:
        assert pack.old is not None
        for row_index in pack.rows:
            logprobs[row_index][rows[row_index].loss_mask] = pack.old[pack.row == row_index]
    return [row_logprobs.tolist() for row_logprobs in logprobs]


def _make_annotated_batch(
    learner: Learner, needs: frozenset[str], rows: Sequence[Sample], token_budget: int
) -> Batch:
    def pack_rows(budget: int) -> Batch:
        return make_batch(
            rows, budget, learner.sharing, "mismatched" in needs, learner.split_above, "lengths" in needs
        )

    return learner.annotate(learner.processes.pack_batch(pack_rows, token_budget), needs)


def split_minibatches(samples: Sequence[Sample], num_parts: int, seed: int = 0) -> list[list[Sample]]:
    """Split the rows at random into parts of about equally many episodes. Rows of one pair or episode stay together."""
    if num_parts == 1:
        return [list(samples)]
    rows_by_pair: dict[int, list[Sample]] = {}
    for sample in samples:
        rows_by_pair.setdefault(sample.pair, []).append(sample)
    groups = list(rows_by_pair.values())
    random.Random(seed).shuffle(groups)
    return [[sample for group in groups[index::num_parts] for sample in group] for index in range(num_parts)]


def merge_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of a step's updates: sum counts, average everything else over the updates that report it."""
    if len(updates) == 1:
        return updates[0]
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        metrics[name] = sum(values) if name in COUNT_METRICS else sum(values) / len(values)
    return metrics
