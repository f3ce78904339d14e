"""Rejection sampling fine-tuning: of the episodes that the model sampled, keep those that the reward accepts, and learn
them as demonstrations.

    L = - sum of w log p / sum of w        over the sampled tokens of the kept episodes of a mini-batch

    w = 1 / n     n: tokens of the kept episodes of the same task      (`balance`: every task weighs the same)
    w = 1                                                              (without: every token does)

Of episodes of a task that made the same calls and gave the same answer one is kept (`dedupe`). Episodes that a length
limit cut are no example of how to end, so they are left out unless asked for. With a `correction`, for what the learner
did not sample itself, log p is multiplied by the weight of `correction.py` as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.correction import Correction, corrected
from TrainingFactory.algorithms.preferences import total_reward
from TrainingFactory.algorithms.trained_tokens import Trained
from TrainingFactory.data.packing import Batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory


@dataclass(slots=True, frozen=True)
class RFT(BaseAlgorithm):
    threshold: float = 1.0
    best_of: int | None = None  # None: all over the threshold
    dedupe: bool = True
    balance: bool = True
    train_truncated: bool = False
    correction: Correction | None = None  # of who samples, not of the algorithm

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.correction is None else frozenset({"old"})

    def accepted(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes of a task that are learned from, the best first."""
        accepted = [
            each
            for each in group
            if each.reward is not None and total_reward(each) >= self.threshold
            if each.status != "truncated" or self.train_truncated
        ]
        ranked = sorted(accepted, key=total_reward, reverse=True)  # equal ones stay in their order
        if self.dedupe:
            first: dict[tuple[str, ...], Trajectory] = {}
            for each in ranked:
                first.setdefault(_conduct(each), each)
            ranked = list(first.values())
        return ranked[: self.best_of]

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        kept = self.accepted(group)
        tokens = sum(len(turn.completion.token_ids) for each in kept for turn in each.turns)
        weight = 1 / tokens if self.balance and tokens else 1.0
        return [row for each in kept for row in to_samples(each, [weight] * len(each.turns))]

    def prepare(self, batches: Sequence[Batch], step: int) -> None:
        """Advantages are the weights; here they get a mean of 1 over the tokens of each step of the optimiser."""
        for batch in batches:
            weight = float(sum(pack.advantages.sum(dtype=float) for pack in batch.packs))
            for pack in batch.packs:
                pack.advantages *= batch.tokens / weight

    def loss(self, trained: Trained) -> tuple[torch.Tensor, dict[str, float]]:
        _, weight, metrics = corrected(trained, self.correction)
        return -(trained.advantages * trained.logprobs * weight).sum() / trained.step_tokens, metrics


def _conduct(trajectory: Trajectory) -> tuple[str, ...]:
    """What an episode did, whatever it said about it: its calls in order, and its last words."""
    calls = [
        json.dumps([call.name, call.arguments], sort_keys=True, default=str)
        for turn in trajectory.turns
        for call in turn.message.tool_calls
    ]
    return (*calls, trajectory.turns[-1].message.content.strip())
