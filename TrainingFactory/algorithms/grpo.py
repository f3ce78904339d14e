"""GRPO and its relatives: a policy gradient whose baseline is what the task's other episodes earned.

    L = -mean over tokens of v min(w A, clip(w, 1 - low, 1 + high) A)  +  kl * KL(now, reference)  -  entropy * H

A is the advantage of the token's turn (`credit.py`); w = p_now / p_sampled, of the token, or with ratio `sequence`
the geometric mean of those of its episode, with the gradient of the token's own (GSPO-token); v is 1. Where A < 0 the
minimum is `clip_dual` A at least. The loss `cispo` has min(w, 1 + high) A log p_now in place of the minimum, with no
gradient through w. With a `correction`, for what the learner did not sample itself, w = p_now / p_old and v is the
weight of `correction.py`.

With advantage `reinforce_plus_plus`, A is the reward, whitened over all trained tokens of the step, and with
`reinforce_plus_plus_baseline` that of `group`, whitened. But for the first, groups whose episodes all earned the same
teach nothing and are left out; so are episodes without a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from TrainingFactory.algorithms.advantages import OVERLONG, Credit, advantages, equal, reward_tables
from TrainingFactory.algorithms.base import BaseAlgorithm, whiten
from TrainingFactory.algorithms.correction import Correction, corrected
from TrainingFactory.algorithms.policy_loss import Estimator, clipped_gain, kl_terms, ratio_of
from TrainingFactory.algorithms.trained_tokens import Trained
from TrainingFactory.data.packing import Batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory

Advantage = Literal["group", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
Normalization = Literal["token", "sequence", "constant"]
Loss = Literal["clip", "cispo"]
Ratio = Literal["token", "sequence"]


@dataclass(slots=True, frozen=True)
class GRPO(BaseAlgorithm):
    advantage: Advantage = "group"
    credit: Credit = "turn"
    scale_rewards: bool = False
    normalization: Normalization = "token"
    constant_length: int = 1024
    loss_kind: Loss = "clip"
    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28  # above clip_low: unlikely tokens may grow faster (clip-higher)
    clip_dual: float | None = 3.0  # None: a negative advantage counts any number of times
    kl: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy: float = 0.0
    train_truncated: bool = True  # whether episodes cut by a length limit are trained on
    overlong_length: int | None = None
    overlong_buffer: int = 128
    overlong_penalty: float = 1.0
    refill: int = 0  # rounds; whoever samples the episodes does it
    refill_by: Literal["reward", "outcome"] = "reward"
    correction: Correction | None = None  # of who samples, not of the algorithm

    def __post_init__(self) -> None:
        """Refuse options that contradict each other; the range of each is checked by the config."""
        if self.overlong_length is not None and self.overlong_buffer > self.overlong_length:
            raise ValueError(
                f"grpo.overlong_buffer is {self.overlong_buffer}; it must be at most overlong_length "
                f"({self.overlong_length})"
            )
        if self.scale_rewards and self._whitened:
            raise ValueError(
                f"grpo.scale_rewards is true; it must be false where grpo.advantage is {self.advantage}, which divides "
                "by the deviation of the whole batch"
            )

    @property
    def _whitened(self) -> bool:
        return self.advantage.startswith("reinforce_plus_plus")

    @property
    def needs(self) -> frozenset[str]:
        wanted = {"reference": self.kl > 0, "old": self.correction is not None}
        return frozenset(name for name, needed in wanted.items() if needed)

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        scored = [trajectory for trajectory in group if trajectory.reward is not None and trajectory.turns]
        alone = self.advantage == "reinforce_plus_plus"  # not compared with its group
        if len(scored) < (1 if alone else 2):
            return []
        outcomes, steps = reward_tables(scored)
        if self.refill and self.refill_by == "outcome" and len(scored) > 1 and equal(outcomes):
            return []
        if self.overlong_length is not None:
            outcomes -= self._penalties(scored, self.overlong_length)
        baseline = "none" if alone else "rloo" if self.advantage == "rloo" else "group"
        table = advantages(outcomes, steps, self.credit, baseline, self.scale_rewards)
        if not alone and not table.any():
            return []
        rows = []
        for trajectory, values in zip(scored, table.tolist(), strict=True):
            if trajectory.status != "truncated" or self.train_truncated:
                rows += to_samples(trajectory, values[: len(trajectory.turns)])
        return rows

    def adjusted(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the episodes with what their length costs among the parts of their rewards, for logs and files."""
        if self.overlong_length is None:
            return list(group)
        penalties = self._penalties(group, self.overlong_length).tolist()
        rows = []
        for each, penalty in zip(group, penalties, strict=True):
            if each.reward is not None:
                parts = each.reward.parts | {OVERLONG: 0.0 - penalty}  # -0.0 reads badly
                each = replace(each, reward=replace(each.reward, parts=parts))
            rows.append(each)
        return rows

    def _penalties(self, group: Sequence[Trajectory], limit: int) -> np.ndarray:
        """Return what episodes lose that come near the length limit. [n]"""
        lengths = np.array([sum(len(turn.completion.token_ids) for turn in t.turns) for t in group])
        over = (lengths - (limit - self.overlong_buffer)) / self.overlong_buffer
        return self.overlong_penalty * np.clip(over, 0.0, 1.0)

    def prepare(self, batches: Sequence[Batch], step: int) -> None:
        if self._whitened:
            whiten([pack for batch in batches for pack in batch.packs])

    def loss(self, trained: Trained) -> tuple[torch.Tensor, dict[str, float]]:
        clip = (self.clip_low, self.clip_high) if self.loss_kind == "clip" else None
        before, weight, weighed = corrected(trained, self.correction, clip, self.ratio == "sequence")
        gap = trained.logprobs - before
        if self.ratio == "sequence":
            whole = (trained.per_episode(gap) / trained.lengths)[trained.episode]
            # Through the mean, every token would be given the mean of its episode's advantages.
            gap = whole.detach() + trained.logprobs - trained.logprobs.detach()
        ratio = ratio_of(gap)
        if self.loss_kind == "cispo":
            gain = ratio.clamp(max=1 + self.clip_high).detach() * trained.advantages * trained.logprobs
            stopped = ratio > 1 + self.clip_high
        else:
            gain, stopped = clipped_gain(
                ratio, trained.advantages, self.clip_low, self.clip_high, self.clip_dual
            )
        metrics = weighed | {
            "clip_fraction": float(stopped.sum()) / trained.step_tokens,
            "logprob_diff": _mean(trained, (trained.logprobs - trained.sampled).abs()),
        }
        terms = -gain * weight
        if self.kl:
            assert trained.reference is not None
            distance = kl_terms(trained.logprobs, trained.reference, self.kl_estimator)
            terms = terms + self.kl * distance
            metrics["kl"] = _mean(trained, distance)
        if self.entropy:
            terms = terms - self.entropy * trained.entropy
        return self._reduced(trained, terms), metrics

    def _reduced(self, trained: Trained, terms: torch.Tensor) -> torch.Tensor:
        """From a term per token to the pack's part of the loss. An episode of several rows counts once."""
        if self.normalization == "token":
            return terms.sum() / trained.step_tokens
        if self.normalization == "constant":
            return terms.sum() / (trained.step_episodes * self.constant_length)
        return (trained.per_episode(terms) / trained.lengths).sum() / trained.step_episodes


def _mean(trained: Trained, values: torch.Tensor) -> float:
    """A pack's part of the mean over the step's tokens."""
    return float(values.detach().sum()) / trained.step_tokens
