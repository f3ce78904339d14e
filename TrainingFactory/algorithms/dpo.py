"""DPO and variants: make the chosen dialogue of a pair more likely than the rejected one.

Every dialogue y has a score s(y), a pair (w chosen, l rejected) has the margin d = s(w) - s(l), and the loss is the
mean over pairs. With R = sum over trained tokens of log p_now - log p_reference, and n trained tokens:

    sigmoid  s = beta R                        -(1 - e) log sig(d) - e log sig(-d)
    robust   s = beta R                        (-(1 - e) log sig(d) + e log sig(-d)) / (1 - 2 e)
    hinge    s = beta R                        max(0, 1 - d)
    ipo      s = R / n                         (d - 1 / (2 beta))^2
    simpo    s = beta mean(log p)              as sigmoid, of d - margin
    orpo     s = log odds of exp mean(log p)   -mean(log p(w)) - beta log sig(d)

e is `label_smoothing`, the assumed share of flipped preference labels (with sigmoid: cDPO). simpo and orpo use no
reference model. A group of scored episodes yields one pair: the best and the worst episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.preferences import make_pair_samples
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.types import Sample, Trajectory

SMOOTHABLE_LOSSES = ("sigmoid", "robust", "simpo")
REFERENCE_FREE_LOSSES = ("orpo", "simpo")
MAX_MEAN_LOGPROB = -1e-6  # upper clamp of mean log-probs, because the odds of probability 1 are infinite


@dataclass(slots=True, frozen=True)
class DPO(BaseAlgorithm):
    loss_kind: Literal["sigmoid", "ipo", "hinge", "robust", "orpo", "simpo"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.5
    reference: Literal["live", "precomputed"] = "live"  # read by the learner; the loss is the same

    def __post_init__(self) -> None:
        if self.label_smoothing and self.loss_kind not in SMOOTHABLE_LOSSES:
            raise ValueError(f"label_smoothing must be 0, or loss_kind one of {', '.join(SMOOTHABLE_LOSSES)}")
        if self.reference == "precomputed" and self.loss_kind in REFERENCE_FREE_LOSSES:
            raise ValueError(f"reference is precomputed, but {self.loss_kind} has none; set it to live")

    @property
    def needs(self) -> frozenset[str]:
        if self.loss_kind in REFERENCE_FREE_LOSSES:
            return frozenset()
        return frozenset({"reference", "precomputed"} if self.reference == "precomputed" else {"reference"})

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        return make_pair_samples(group)

    def loss(self, tokens: TrainedTokens) -> tuple[torch.Tensor, dict[str, float]]:
        scores = self._score_dialogues(tokens)
        chosen_scores, rejected_scores = scores[tokens.pairs].unbind(1)  # [P] each
        loss_sum = self._compute_pair_losses(chosen_scores - rejected_scores).sum()
        if self.loss_kind == "orpo":
            loss_sum = loss_sum - _average_logprobs(tokens)[tokens.pairs[:, 0]].sum()
        terms = {
            "accuracy": chosen_scores > rejected_scores,
            "rewards/margin": chosen_scores - rejected_scores,
            "rewards/chosen": chosen_scores,
            "rewards/rejected": rejected_scores,
        }
        metrics = {name: float(values.detach().sum()) / tokens.step_pairs for name, values in terms.items()}
        return loss_sum / tokens.step_pairs, metrics

    def _score_dialogues(self, tokens: TrainedTokens) -> torch.Tensor:
        """Return the score s of every dialogue. [E]"""
        if self.loss_kind == "simpo":
            return self.beta * _average_logprobs(tokens)
        if self.loss_kind == "orpo":
            mean_logprobs = _average_logprobs(tokens).clamp(max=MAX_MEAN_LOGPROB)
            return mean_logprobs - torch.log(-torch.expm1(mean_logprobs))
        assert tokens.reference_logprobs is not None
        log_ratios = tokens.sum_per_episode(tokens.logprobs - tokens.reference_logprobs)
        return log_ratios / tokens.lengths if self.loss_kind == "ipo" else self.beta * log_ratios

    def _compute_pair_losses(self, margins: torch.Tensor) -> torch.Tensor:
        """Return the loss of every pair from its margin d. [P] -> [P]"""
        if self.loss_kind == "hinge":
            return torch.relu(1 - margins)
        if self.loss_kind == "ipo":
            return (margins - 1 / (2 * self.beta)).square()
        if self.loss_kind == "orpo":
            return -self.beta * logsigmoid(margins)
        if self.loss_kind == "simpo":
            margins = margins - self.margin
        flip_rate = self.label_smoothing
        labelled_loss = -(1 - flip_rate) * logsigmoid(margins)
        flipped_loss = -flip_rate * logsigmoid(-margins)
        if self.loss_kind == "robust":
            return (labelled_loss - flipped_loss) / (1 - 2 * flip_rate)
        return labelled_loss + flipped_loss


def _average_logprobs(tokens: TrainedTokens) -> torch.Tensor:
    """Return the mean log-prob of each dialogue's trained tokens. [E]"""
    return tokens.sum_per_episode(tokens.logprobs) / tokens.lengths
