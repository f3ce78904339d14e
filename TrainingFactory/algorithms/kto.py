"""KTO: learns from single dialogues that are labelled good or bad; no dialogue has to be compared with another.

With R = sum over trained tokens of log p_now - log p_reference:

    L  = mean over dialogues of  w (1 - sig(beta (R - z)))   good ones, w = desirable_weight
                                 w (1 - sig(beta (z - R)))   bad ones,  w = undesirable_weight
    z  = max(0, mean of R over the step's mismatched rows)

A mismatched row is the answer of one dialogue after the prompt of another. z has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.preferences import total_reward
from TrainingFactory.algorithms.trained_tokens import Trained
from TrainingFactory.data.packing import Batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory


@dataclass(slots=True, frozen=True)
class KTO(BaseAlgorithm):
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    threshold: float = 0.5  # rewards above it are good

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference", "mismatched"})

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        """Every scored episode is an example; its label is 1 or 0."""
        rows = []
        for each in group:
            if each.reward is not None:
                rows += to_samples(each, label=float(total_reward(each) > self.threshold))
        return rows

    def prepare(self, batches: Sequence[Batch], step: int) -> None:
        for batch in batches:
            sums = {"ratios": 0.0, "rows": 0.0}
            for pack in batch.mismatched:
                assert pack.old is not None and pack.reference is not None
                sums["ratios"] += float((pack.old - pack.reference).sum(dtype="float64"))
                sums["rows"] += len(pack.rows)
            batch.baseline = max(0.0, sums["ratios"] / sums["rows"]) if sums["rows"] else 0.0

    def loss(self, trained: Trained) -> tuple[torch.Tensor, dict[str, float]]:
        assert trained.reference is not None
        good = trained.labels > 0.5
        ratios = trained.per_episode(trained.logprobs - trained.reference)  # [E]
        # by how much each dialogue is on its right side of the baseline
        lead = self.beta * torch.where(good, ratios - trained.baseline, trained.baseline - ratios)
        weights = torch.where(good, self.desirable_weight, self.undesirable_weight)
        loss = (weights * (1 - lead.sigmoid())).sum()
        episodes = trained.step_episodes
        metrics = {
            "accuracy": float((lead > 0).sum()) / episodes,
            "desirable": float(good.sum()) / episodes,
            "rewards/margin": float(lead.detach().sum()) / episodes,
            "kl": trained.baseline * len(good) / episodes,  # adds up to the baseline over packs
        }
        return loss / episodes, metrics
