"""Importance weights for off-policy tokens: sampled by an engine with other numerics, or by older weights.

    v = min(p_old / p_sampled, cap)          p_old: the learner before the step; p_sampled: the sampler

Ratio and clip are taken against p_old, and the loss of a token is multiplied by v, which has no gradient (decoupled
form: the trust region does not depend on the sampler). With `mask` = (low, high), tokens whose p_old / p_sampled is
outside get weight 0 (IcePop). Losses are divided by all trained tokens, masked ones included.

`anchored` is for stale tokens. Updates since a token was sampled may already have moved it as far as the clip allows
one update to, and its gradient keeps pushing until fresher groups arrive. Such a token gets weight 0: where A > 0 and
p_old / p_sampled > 1 + clip_high, or A < 0 and the ratio is < 1 - clip_low. Without this, runs on a plateau overshoot
and collapse: 7 of 40 at a policy lag of two versions, 3 of 10 at four, none of 30 with it (docs/CLUSTER.md).

By `token`, v is the token's own ratio: low variance, but it ignores how likely the sampler was to reach this state. By
`sequence`, every token gets the product over its episode: unbiased over episodes unless capped, but the variance grows
with the length. The geometric mean would have low variance, but is biased as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from TrainingFactory.algorithms.policy_loss import compute_ratio
from TrainingFactory.algorithms.trained_tokens import TrainedTokens


@dataclass(slots=True, frozen=True)
class Correction:
    cap: float = 2.0
    level: Literal["token", "sequence"] = "token"
    mask: tuple[float, float] | None = None
    anchored: bool = False  # zero stale tokens that already moved beyond the clip


def compute_importance_weights(
    tokens: TrainedTokens,
    correction: Correction | None,
    clip: tuple[float, float] | None = None,
    uses_sequence_ratios: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | float, dict[str, float]]:
    """Return the log-probs in the denominator of the policy ratio, the weights of the tokens, and metrics that are
    summed over packs. `clip`: the loss's bounds below and above 1; None if it has none. Set `uses_sequence_ratios`
    if the loss uses the ratio of whole sequences."""
    if correction is None:
        return tokens.sampled_logprobs, 1.0, {}
    assert tokens.old_logprobs is not None
    log_ratio = tokens.old_logprobs - tokens.sampled_logprobs
    is_shifted = torch.zeros_like(log_ratio, dtype=torch.bool)
    if correction.anchored and clip is not None:
        mean_log_ratio = (tokens.sum_per_episode(log_ratio) / tokens.lengths)[tokens.episode_ids]
        drift = compute_ratio(mean_log_ratio if uses_sequence_ratios else log_ratio)
        is_shifted = torch.where(tokens.advantages > 0, drift > 1 + clip[1], drift < 1 - clip[0])
        is_shifted &= tokens.advantages != 0
    if correction.level == "sequence":
        log_ratio = tokens.sum_per_episode(log_ratio)[tokens.episode_ids]
    ratio = compute_ratio(log_ratio)
    min_ratio, max_ratio = correction.mask or (0.0, float("inf"))
    in_range = (min_ratio <= ratio) & (ratio <= max_ratio)
    weights = ratio.clamp(max=correction.cap) * (in_range & ~is_shifted)
    terms = {
        "weight": weights,
        "masked": ~in_range,
        "capped": (ratio > correction.cap) & in_range,
        "moved": is_shifted,
    }
    metrics = {
        f"importance_{name}": float(tokens.sum_weighted(term)) / tokens.step_tokens
        for name, term in terms.items()
    }
    return tokens.old_logprobs, weights, metrics
