"""Building blocks of policy-gradient losses: ratios, clipping and KL estimators. All tensors are [M]."""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0  # clamp of log-ratios on both sides, so that exp() stays finite
MAX_K3 = 10.0  # reached where a token is 14 times likelier in the reference, or 60,000 times in the model


def estimate_kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimate the KL divergence from the reference at each sampled token, with d = log p_now - log p_ref:

        k1   d                  unbiased for KL(now, ref); can be negative
        k2   d^2 / 2            biased, never negative; its gradient is unbiased for KL(now, ref)'s
        k3   e^-d + d - 1       unbiased for KL(now, ref), never negative; its gradient is unbiased for KL(ref, now)'s

    The gradient of d has mean zero for any reference, so k1 uses the gradient of k2. The gradient of k3 grows with
    e^-d, so k3 is clamped to 10 per token and has no gradient beyond."""
    log_ratio = logprobs - reference
    if estimator == "k3":
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return ((-log_ratio).exp() + log_ratio - 1).clamp(max=MAX_K3)
    half_square = log_ratio.square() / 2
    return half_square if estimator == "k2" else half_square + (log_ratio - half_square).detach()


def compute_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the probability ratio w = e^d of a difference d of log-probs. d is clamped to |d| <= 20 and has no
    gradient beyond."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clip_objective(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return min(w A, clip(w, 1 - low, 1 + high) A), and a mask of the clipped tokens, which have no gradient. Where A
    is negative, the minimum is unbounded below, so dual clip limits it to at least `dual_clip` A. None: no limit."""
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return gain, gain != ratio * advantages
