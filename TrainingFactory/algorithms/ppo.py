"""PPO: a policy gradient whose baseline is a critic's value before each token.

    A, V  advantages by `gae.py`, and the critic's values; with `whiten`, A is whitened over the step
    R     = A + V before whitening and before the step: the returns, the critic's targets
    L     = mean over tokens of  -min(w A, clip(w, 1 - clip, 1 + clip) A), or where A < 0 -clip_dual A if that is less
                                 + value_weight / 2 max((V - R)^2, (V_old + clip(V - V_old, +-value_clip) - R)^2)
                                 + kl KL(now, reference) - entropy H

where w = p_now / p_sampled for each token, and the mean is over all trained tokens of the step. A step reward is
assigned to the last token of its turn, the outcome to the last token of the last turn. With `kl_in="reward"`,
kl (log p_sampled - log p_reference) is subtracted from each token's reward instead. With a `correction`, for off-policy
tokens, p_old replaces p_sampled in both, and the minimum is multiplied by the weight of `correction.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from TrainingFactory.algorithms.base import MIN_DEVIATION, BaseAlgorithm, compute_moments, whiten_advantages
from TrainingFactory.algorithms.correction import Correction, compute_importance_weights
from TrainingFactory.algorithms.gae import compute_gae
from TrainingFactory.algorithms.policy_loss import clip_objective, compute_ratio, estimate_kl
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.data.packing import Batch, Pack
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory


@dataclass(slots=True, frozen=True)
class PPO(BaseAlgorithm):
    critic: Literal["head", "separate"] = "head"  # read by the learner, like the next option
    critic_learning_rate: float | None = None
    gamma: float = 1.0
    lam: float = 1.0
    clip: float = 0.2
    clip_dual: float | None = 3.0  # None: no dual clip
    value_clip: float | None = 0.2  # None: no value clipping
    value_weight: float = 0.1
    critic_warmup: int = 0  # steps in which only the critic is trained
    whiten: bool = True
    kl: float = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy: float = 0.0
    train_truncated: bool = True  # whether episodes cut by a length limit are trained on
    correction: Correction | None = None  # set if the sampler is off-policy

    @property
    def needs(self) -> frozenset[str]:
        inputs = {"values": True, "reference": self.kl > 0, "critic": self.critic == "separate"}
        inputs["old"] = self.correction is not None
        return frozenset(name for name, is_needed in inputs.items() if is_needed)

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        rows = []
        for trajectory in group:
            if trajectory.reward is None or not trajectory.turns:
                continue
            if trajectory.status == "truncated" and not self.train_truncated:
                continue
            rewards = list(trajectory.reward.steps) or [0.0] * len(trajectory.turns)
            rewards[-1] += trajectory.reward.outcome
            for t in reversed(range(1, len(rewards))):
                if trajectory.turns[t].masked:  # its reward follows from the turns before
                    rewards[t - 1] += rewards[t]
            rows += to_samples(trajectory, rewards=rewards)
        return rows

    def prepare(self, batches: Sequence[Batch], step: int) -> None:
        packs = [pack for batch in batches for pack in batch.packs]
        for pack in packs:
            self._fill_advantages(pack)
        _, deviation = compute_moments([pack.returns for pack in packs if pack.returns is not None])
        if self.whiten:
            whiten_advantages(packs)
        for pack in packs:
            pack.advantages = pack.advantages.astype("float32")
        for batch in batches:
            batch.baseline = deviation**2
            batch.values_only = step < self.critic_warmup

    def _fill_advantages(self, pack: Pack) -> None:
        """Compute the pack's advantages, in float64, and returns, and store them in the pack."""
        assert pack.values is not None
        rewards = pack.rewards.astype("float64")
        if self.kl and self.kl_in == "reward":
            assert pack.reference is not None
            rewards -= self.kl * ((pack.logprobs if pack.old is None else pack.old) - pack.reference)
        pack.advantages = compute_gae(rewards, pack.values, pack.episode, pack.row, self.gamma, self.lam)
        pack.returns = (pack.advantages + pack.values).astype("float32")

    def loss(self, tokens: TrainedTokens) -> tuple[torch.Tensor, dict[str, float]]:
        old_logprobs, weights, metrics = compute_importance_weights(
            tokens, self.correction, (self.clip, self.clip)
        )
        ratio = compute_ratio(tokens.logprobs - old_logprobs)
        gain, is_clipped = clip_objective(ratio, tokens.advantages, self.clip, self.clip, self.clip_dual)
        value_loss = self._compute_value_loss(tokens)
        loss_sum = -(gain * weights).sum() + self.value_weight * value_loss
        metric_sums = {
            "clip_fraction": is_clipped.sum(),
            "logprob_diff": (tokens.logprobs - tokens.sampled_logprobs).abs().sum(),
            "value_loss": value_loss,
        }
        if tokens.baseline > MIN_DEVIATION**2:  # the variance of the returns
            assert tokens.returns is not None and tokens.old_values is not None
            squared_errors = (tokens.returns - tokens.old_values) ** 2
            metric_sums["explained_variance"] = (1 - squared_errors / tokens.baseline).sum()
        if tokens.reference_logprobs is not None:
            divergence = estimate_kl(tokens.logprobs, tokens.reference_logprobs, self.kl_estimator).sum()
            loss_sum = loss_sum + (self.kl * divergence if self.kl_in == "loss" else 0.0)
            metric_sums["kl"] = divergence
        if self.entropy:
            loss_sum = loss_sum - self.entropy * tokens.entropy.sum()
        metrics |= {name: float(total.detach()) / tokens.step_tokens for name, total in metric_sums.items()}
        return loss_sum / tokens.step_tokens, metrics

    def _compute_value_loss(self, tokens: TrainedTokens) -> torch.Tensor:
        values, old_values, returns = tokens.values, tokens.old_values, tokens.returns
        assert values is not None and old_values is not None and returns is not None, "call `prepare` first"
        squared_errors = (values - returns) ** 2
        if self.value_clip is not None:
            clipped_values = old_values + (values - old_values).clamp(-self.value_clip, self.value_clip)
            squared_errors = torch.maximum(squared_errors, (clipped_values - returns) ** 2)
        return squared_errors.sum() / 2
