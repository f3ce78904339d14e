"""Reward models: a head on the model that gives a number for a dialogue, or for each of its turns.

Outcome (Bradley-Terry), over pairs of dialogues with scores s+ and s- at their last sampled token:

    L = mean of -log sigmoid(s+ - s- - m) + center * mean of (s+ + s-)^2

where m is the difference of the two rewards if `margin`, else 0. The second term pins what the first leaves open:
adding a constant to all scores. Of a group the best and the worst episode are a pair.

Process, over turns t with score s_t at the turn's last token and label y_t = 1 if its step reward is over
`threshold`, else 0:

    L = mean over turns of -y_t log sigmoid(s_t) - (1 - y_t) log sigmoid(-s_t)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.preferences import rows_of_pair
from TrainingFactory.algorithms.trained_tokens import Trained
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory

Metrics = dict[str, float]


@dataclass(slots=True, frozen=True)
class RewardModel(BaseAlgorithm):
    kind: Literal["outcome", "process"] = "outcome"
    margin: bool = False  # outcome: the better one must lead by the difference of the rewards
    center: float = 0.0  # outcome: weight of the pull towards scores around 0
    threshold: float = 0.0  # process: turns with a step reward over it are good

    def __post_init__(self) -> None:
        if self.kind == "outcome" and self.threshold:
            raise ValueError("threshold is for kind=process: an outcome model learns which of two is better")
        if self.kind == "process" and (self.margin or self.center):
            raise ValueError(
                "margin and center are for kind=outcome: a process model learns labels of turns, not pairs"
            )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"scores"})

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        if self.kind == "process":
            labelled = [(each, each.reward.steps) for each in group if each.reward and each.reward.steps]
            return [row for each, steps in labelled for row in to_samples(each, None, steps, tokens="last")]
        return rows_of_pair(group, turns="last", tokens="last")

    def loss(self, trained: Trained) -> tuple[torch.Tensor, Metrics]:
        assert trained.scores is not None
        judge = self._outcome if self.kind == "outcome" else self._process
        return judge(trained, trained.scores)

    def _outcome(self, trained: Trained, scores: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        # One token of each episode is trained, its last: [M] -> [E] -> [P] each.
        better, worse = trained.per_episode(scores)[trained.pairs].unbind(1)
        gap = better - worse
        wanted = torch.zeros_like(gap)
        if self.margin:
            wanted = trained.labels[trained.pairs[:, 0]] - trained.labels[trained.pairs[:, 1]]
        total = -logsigmoid(gap - wanted).sum() + self.center * (better + worse).square().sum()
        pairs = trained.step_pairs
        metrics = {"accuracy": float((gap > 0).sum()) / pairs, "margin": float(gap.detach().sum()) / pairs}
        return total / pairs, metrics

    def _process(self, trained: Trained, scores: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        good = (trained.rewards > self.threshold).float()
        total = binary_cross_entropy_with_logits(scores, good, reduction="sum")
        wrong = ((scores > 0) != (good > 0)).float()
        metrics = {
            "accuracy": float((1 - wrong).sum()) / trained.step_tokens,
            "good": float(good.sum()) / trained.step_tokens,
            # every turn of the dialogue is judged right, the first bad one among them
            "dialogues_right": float((trained.per_episode(wrong) == 0).sum()) / trained.step_episodes,
        }
        return total / trained.step_tokens, metrics
