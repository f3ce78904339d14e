"""DPO and its relatives: of two dialogues about the same task, make the better one likelier than the worse one.

Every dialogue y has a score s(y), a pair (w better, l worse) has the lead d = s(w) - s(l), and the loss is the mean
over pairs. With R = sum over trained tokens of log p_now - log p_reference, and n trained tokens:

    sigmoid  s = beta R                        -(1 - e) log sig(d) - e log sig(-d)
    robust   s = beta R                        (-(1 - e) log sig(d) + e log sig(-d)) / (1 - 2 e)
    hinge    s = beta R                        max(0, 1 - d)
    ipo      s = R / n                         (d - 1 / (2 beta))^2
    simpo    s = beta mean(log p)              as sigmoid, of d - margin
    orpo     s = log odds of exp mean(log p)   -mean(log p(w)) - beta log sig(d)

e is `label_smoothing`, the share of pairs that are labelled the wrong way round (with sigmoid: cDPO). simpo and orpo
have no reference model. A group of scored episodes gives one pair, its best against its worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.preferences import rows_of_pair
from TrainingFactory.algorithms.trained_tokens import Trained
from TrainingFactory.types import Sample, Trajectory

SMOOTHED = ("sigmoid", "robust", "simpo")
WITHOUT_REFERENCE = ("orpo", "simpo")
SURE = -1e-6  # mean log-probs above it count as this: the odds of certainty are infinite


@dataclass(slots=True, frozen=True)
class DPO(BaseAlgorithm):
    loss_kind: Literal["sigmoid", "ipo", "hinge", "robust", "orpo", "simpo"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.5
    reference: Literal["live", "precomputed"] = "live"  # who computes it is not the loss's business

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss_kind not in SMOOTHED:
            raise ValueError(
                f"label_smoothing is for {', '.join(SMOOTHED)}; {self.loss_kind} has no use for it: leave it at 0"
            )
        if self.reference == "precomputed" and self.loss_kind in WITHOUT_REFERENCE:
            raise ValueError(f"reference is precomputed, but {self.loss_kind} has none: leave it at live")

    @property
    def needs(self) -> frozenset[str]:
        if self.loss_kind in WITHOUT_REFERENCE:
            return frozenset()
        return frozenset({"reference", "precomputed"} if self.reference == "precomputed" else {"reference"})

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        return rows_of_pair(group)

    def loss(self, trained: Trained) -> tuple[torch.Tensor, dict[str, float]]:
        scores = self._scores(trained)
        better, worse = scores[trained.pairs].unbind(1)  # [P] each
        total = self._losses(better - worse).sum()
        if self.loss_kind == "orpo":
            total = total - _mean_logprobs(trained)[trained.pairs[:, 0]].sum()
        sums = {
            "accuracy": better > worse,
            "rewards/margin": better - worse,
            "rewards/chosen": better,
            "rewards/rejected": worse,
        }
        metrics = {name: float(each.detach().sum()) / trained.step_pairs for name, each in sums.items()}
        return total / trained.step_pairs, metrics

    def _scores(self, trained: Trained) -> torch.Tensor:
        """s of every dialogue. [E]"""
        if self.loss_kind == "simpo":
            return self.beta * _mean_logprobs(trained)
        if self.loss_kind == "orpo":
            mean = _mean_logprobs(trained).clamp(max=SURE)
            return mean - torch.log(-torch.expm1(mean))
        assert trained.reference is not None
        ratios = trained.per_episode(trained.logprobs - trained.reference)
        return ratios / trained.lengths if self.loss_kind == "ipo" else self.beta * ratios

    def _losses(self, lead: torch.Tensor) -> torch.Tensor:
        """[P] -> [P]"""
        if self.loss_kind == "hinge":
            return torch.relu(1 - lead)
        if self.loss_kind == "ipo":
            return (lead - 1 / (2 * self.beta)).square()
        if self.loss_kind == "orpo":
            return -self.beta * logsigmoid(lead)
        if self.loss_kind == "simpo":
            lead = lead - self.margin
        wrong = self.label_smoothing
        right_way, other_way = -(1 - wrong) * logsigmoid(lead), -wrong * logsigmoid(-lead)
        return (
            (right_way - other_way) / (1 - 2 * wrong) if self.loss_kind == "robust" else right_way + other_way
        )


def _mean_logprobs(trained: Trained) -> torch.Tensor:
    """Per trained token of each dialogue. [E]"""
    return trained.per_episode(trained.logprobs) / trained.lengths
