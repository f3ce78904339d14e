"""Pieces of the losses that weigh tokens by how much their probability has moved. All tensors are [M]."""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]
MOST_LOG_RATIO = 20.0  # either way; beyond it e^gap is no longer a number to compute with
MOST_K3 = 10.0  # at a token that the reference finds 14 times likelier, or the model 60,000 times


def kl_terms(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """How far the model is from the reference, estimated at each sampled token; d = log p_now - log p_ref:

        k1   d                  its mean is KL(now, ref); may be negative
        k2   d^2 / 2            close to it, never negative; its gradient has the mean of KL(now, ref)'s
        k3   e^-d + d - 1       its mean is KL(now, ref), never negative; its gradient has that of KL(ref, now)

    The derivative of d has mean zero whatever the reference, so k1 is given that of k2. That of k3 grows with e^-d: a
    token counts as 10 at most, and pulls no more beyond."""
    gap = logprobs - reference
    if estimator == "k3":
        gap = gap.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        return ((-gap).exp() + gap - 1).clamp(max=MOST_K3)
    halved = gap.square() / 2
    return halved if estimator == "k2" else halved + (gap - halved).detach()


def ratio_of(gap: torch.Tensor) -> torch.Tensor:
    """Return w = e^gap for a gap of log-probs; beyond 20 it stays as it is, and has no gradient."""
    return gap.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def clipped_gain(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, dual: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return min(w A, clip(w, 1 - low, 1 + high) A), and which tokens are held at a bound: nothing is gained by moving
    further. Where A is negative the minimum has no bound above, so it is dual A at least (dual clip)."""
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual * advantages), gain)
    return gain, gain != ratio * advantages
