"""What a loss is given: the trained tokens of a pack, and counts over the whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Trained:
    """M trained tokens of E episodes. A loss divides by the step's counts, so that packing changes no gradient."""

    logprobs: torch.Tensor  # [M] of the model now, with gradient; empty where `scores` are needed instead
    entropy: torch.Tensor  # [M] of the model now, with gradient
    sampled: torch.Tensor  # [M] log-probs of the sampler
    advantages: torch.Tensor  # [M]
    rewards: torch.Tensor  # [M]
    episode: torch.Tensor  # [M] which episode a token belongs to, counted from 0 within the pack
    labels: torch.Tensor  # [E]
    pairs: torch.Tensor  # [P, 2] episodes that are compared: the better one, the worse one
    step_tokens: int  # trained tokens of the whole step
    step_episodes: int
    step_pairs: int
    reference: torch.Tensor | None = None  # [M] log-probs of the reference model
    old: torch.Tensor | None = None  # [M] log-probs of the model before the step
    values: torch.Tensor | None = None  # [M] of the critic now, before each token, with gradient
    old_values: torch.Tensor | None = None  # [M] of the critic before the step
    returns: torch.Tensor | None = None  # [M]
    scores: torch.Tensor | None = None  # [M] of the reward model now, at each token, with gradient
    baseline: float = 0.0  # what `prepare` found for the step as a whole

    def per_episode(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the tokens of each episode. [M] -> [E]"""
        return values.new_zeros(len(self.labels)).index_add(0, self.episode, values)

    @property
    def lengths(self) -> torch.Tensor:
        """Trained tokens of each episode. [E]"""
        return self.per_episode(torch.ones_like(self.logprobs))


# A pack's part of the step's loss, and metrics that add up over packs to the step's.
Loss = Callable[[Trained], tuple[torch.Tensor, dict[str, float]]]
