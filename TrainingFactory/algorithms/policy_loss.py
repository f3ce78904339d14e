"""Pieces of the losses that weigh tokens by how much their probability has moved. All tensors are [M]."""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]


def kl_terms(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """How far the model is from the reference, estimated at each sampled token; d = log p_now - log p_ref:

        k1   d                  its mean is KL(now, ref); may be negative
        k2   d^2 / 2            close to it, never negative; its gradient has the mean of KL(now, ref)'s
        k3   e^-d + d - 1       its mean is KL(now, ref), never negative; its gradient has that of KL(ref, now)

    The derivative of d has mean zero whatever the reference, so k1 is given that of k2."""
    gap = logprobs - reference
    if estimator == "k3":
        return (-gap).exp() + gap - 1
    halved = gap.square() / 2
    return halved if estimator == "k2" else halved + (gap - halved).detach()


def clipped_gain(ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(w A, clip(w, 1 - low, 1 + high) A): nothing is gained by moving further than the bounds."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
