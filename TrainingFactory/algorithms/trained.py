"""What a loss is given: the trained tokens of a pack, and counts over the whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Trained:
    """[M] each. A loss divides by the step's counts, so that packing does not change the gradient."""

    logprobs: torch.Tensor  # of the model now, with gradient
    entropy: torch.Tensor  # of the model now, without
    sampled: torch.Tensor  # log-probs of the sampler
    advantages: torch.Tensor
    rewards: torch.Tensor
    row: torch.Tensor  # which training row a token belongs to
    reference: torch.Tensor | None  # log-probs of the reference model
    step_tokens: int  # trained tokens of the whole step
    step_rows: int


# A pack's part of the step's loss, and figures that add up over packs to the step's.
Loss = Callable[[Trained], tuple[torch.Tensor, dict[str, float]]]
