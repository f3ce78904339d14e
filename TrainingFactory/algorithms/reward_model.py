"""Reward models: a scalar head that scores a dialogue, or each of its turns.

Outcome (Bradley-Terry), over pairs of dialogues with scores s+ and s- at their last sampled token:

    L = mean of -log sigmoid(s+ - s- - m) + center * mean of (s+ + s-)^2

where m is the difference of the two rewards if `margin`, else 0. The second term fixes the additive constant of the
scores, which the first leaves open. A group yields one pair: its best and its worst episode.

Process, over turns t with score s_t at the turn's last token and label y_t = 1 if its step reward is above `threshold`,
else 0:

    L = mean over turns of -y_t log sigmoid(s_t) - (1 - y_t) log sigmoid(-s_t)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.preferences import make_pair_samples
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory

Metrics = dict[str, float]


@dataclass(slots=True, frozen=True)
class RewardModel(BaseAlgorithm):
    kind: Literal["outcome", "process"] = "outcome"
    margin: bool = False  # outcome: require a margin of the difference of the two rewards
    center: float = 0.0  # outcome: weight of the term that centers scores around 0
    threshold: float = 0.0  # process: turns with a step reward above it are good

    def __post_init__(self) -> None:
        if self.kind == "outcome" and self.threshold:
            raise ValueError("threshold requires kind=process; kind=outcome learns from pairs")
        if self.kind == "process" and (self.margin or self.center):
            raise ValueError("margin and center require kind=outcome; kind=process learns from turn labels")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"scores"})

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        if self.kind == "process":
            rows: list[Sample] = []
            for trajectory in group:
                if trajectory.reward and trajectory.reward.steps:
                    rows += to_samples(trajectory, None, trajectory.reward.steps, tokens="last")
            return rows
        return make_pair_samples(group, turns="last", tokens="last")

    def loss(self, tokens: TrainedTokens) -> tuple[torch.Tensor, Metrics]:
        assert tokens.scores is not None
        compute_loss = self._get_outcome_loss if self.kind == "outcome" else self._get_process_loss
        return compute_loss(tokens, tokens.scores)

    def _get_outcome_loss(self, tokens: TrainedTokens, scores: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        # Only the last token of each episode is trained: [M] -> [E] -> [P] each.
        chosen, rejected = tokens.sum_per_episode(scores)[tokens.pairs].unbind(1)
        gaps = chosen - rejected
        margins = torch.zeros_like(gaps)
        if self.margin:
            margins = tokens.labels[tokens.pairs[:, 0]] - tokens.labels[tokens.pairs[:, 1]]
        loss_sum = -logsigmoid(gaps - margins).sum() + self.center * (chosen + rejected).square().sum()
        metric_sums = {"accuracy": (gaps > 0).sum(), "margin": gaps.detach().sum()}
        metrics = {name: float(total) / tokens.step_pairs for name, total in metric_sums.items()}
        return loss_sum / tokens.step_pairs, metrics

    def _get_process_loss(self, tokens: TrainedTokens, scores: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        is_good = (tokens.rewards > self.threshold).float()
        loss_sum = binary_cross_entropy_with_logits(scores, is_good, reduction="sum")
        errors = ((scores > 0) != (is_good > 0)).float()
        metrics = {
            "accuracy": float((1 - errors).sum()) / tokens.step_tokens,
            "good": float(is_good.sum()) / tokens.step_tokens,
            # share of dialogues with every turn classified correctly
            "dialogues_right": float((tokens.sum_per_episode(errors) == 0).sum()) / tokens.step_episodes,
        }
        return loss_sum / tokens.step_tokens, metrics
