"""KTO: learning from unpaired dialogues that are labelled desirable or undesirable.

With R = sum over trained tokens of log p_now - log p_reference:

    L  = mean over dialogues of  w (1 - sig(beta (R - z)))   desirable,   w = desirable_weight
                                 w (1 - sig(beta (z - R)))   undesirable, w = undesirable_weight
    z  = max(0, mean of R over the step's mismatched rows)

A mismatched row pairs the prompt of one dialogue with the answer of another. z has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.preferences import sum_rewards
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.data.packing import Batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory


@dataclass(slots=True, frozen=True)
class KTO(BaseAlgorithm):
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    threshold: float = 0.5  # episodes with a total reward above it are desirable

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference", "mismatched"})

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        """Return one example per scored episode, with label 1 (desirable) or 0."""
        rows = []
        for trajectory in group:
            if trajectory.reward is not None:
                rows += to_samples(trajectory, label=float(sum_rewards(trajectory) > self.threshold))
        return rows

    def prepare(self, batches: Sequence[Batch], step: int) -> None:
        for batch in batches:
            log_ratio_sum = 0.0
            num_rows = 0
            for pack in batch.mismatched:
                assert pack.old is not None and pack.reference is not None
                log_ratio_sum += float((pack.old - pack.reference).sum(dtype="float64"))
                num_rows += len(pack.rows)
            batch.baseline = max(0.0, log_ratio_sum / num_rows) if num_rows else 0.0

    def loss(self, tokens: TrainedTokens) -> tuple[torch.Tensor, dict[str, float]]:
        assert tokens.reference_logprobs is not None
        is_desirable = tokens.labels > 0.5
        gaps = tokens.sum_per_episode(tokens.logprobs - tokens.reference_logprobs) - tokens.baseline  # [E]
        # distance of each dialogue from the baseline, positive on the side that its label asks for
        margin = self.beta * torch.where(is_desirable, gaps, -gaps)
        weights = torch.where(is_desirable, self.desirable_weight, self.undesirable_weight)
        loss = (weights * (1 - margin.sigmoid())).sum()
        num_episodes = tokens.step_episodes
        metrics = {
            "accuracy": float((margin > 0).sum()) / num_episodes,
            "desirable": float(is_desirable.sum()) / num_episodes,
            "rewards/margin": float(margin.detach().sum()) / num_episodes,
            "kl": tokens.baseline * len(is_desirable) / num_episodes,  # the sum over packs is the baseline
        }
        return loss / num_episodes, metrics
