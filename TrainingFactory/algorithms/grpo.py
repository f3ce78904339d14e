"""GRPO: a policy gradient whose baseline is the mean reward of the task's other episodes.

    A_i = r_i - mean(r)          (divided by the group's deviation if `scale_rewards`)
    L   = -mean over tokens of min(w A, clip(w, 1 - low, 1 + high) A) + kl * KL(now, reference)

where w = p_now / p_sampled for each token, and KL is the estimator e^d - d - 1 with d = log p_ref - log p_now.
The mean is over all trained tokens of the step. Groups whose episodes all earned the same teach nothing and
are left out; so are episodes without a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch

from TrainingFactory.algorithms.trained import Trained
from TrainingFactory.data.packing import Batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory


@dataclass(slots=True, frozen=True)
class GRPO:
    clip_low: float = 0.2
    clip_high: float = 0.28  # above clip_low: unlikely tokens may grow faster (clip-higher)
    scale_rewards: bool = True
    kl: float = 0.0
    train_truncated: bool = True  # whether episodes cut by a length limit are trained on

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or not self.clip_high > 0:
            raise ValueError(
                f"clip_low {self.clip_low} must lie between 0 and 1, clip_high {self.clip_high} over 0"
            )
        if self.kl < 0:
            raise ValueError(f"kl is {self.kl}; it must be 0 or more")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference"} if self.kl else ())

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        scored = [(t, t.reward.outcome + sum(t.reward.steps)) for t in group if t.reward is not None]
        rewards = [reward for _, reward in scored]
        # Equal up to rounding is equal: dividing by such a deviation would make noise as large as a reward.
        if len(scored) < 2 or max(rewards) - min(rewards) <= 1e-6 * max(map(abs, rewards)):
            return []
        mean = fmean(rewards)
        scale = pstdev(rewards) if self.scale_rewards else 1.0
        rows = []
        for trajectory, reward in scored:
            if trajectory.status != "truncated" or self.train_truncated:
                rows += to_samples(trajectory, [(reward - mean) / scale] * len(trajectory.turns))
        return rows

    def prepare(self, batches: Sequence[Batch], step: int) -> None: ...

    def loss(self, trained: Trained) -> tuple[torch.Tensor, dict[str, float]]:
        gap = trained.logprobs - trained.sampled
        ratio = gap.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain = torch.minimum(ratio * trained.advantages, clipped * trained.advantages)
        total = -gain.sum()
        figures = {
            "clipped": float((ratio * trained.advantages > gain).sum()) / trained.step_tokens,
            "sampler_gap": float(gap.detach().abs().sum()) / trained.step_tokens,
        }
        if self.kl:
            assert trained.reference is not None
            distance = trained.reference - trained.logprobs
            divergence = (distance.exp() - distance - 1).sum()
            total = total + self.kl * divergence
            figures["kl"] = float(divergence.detach()) / trained.step_tokens
        return total / trained.step_tokens, figures
