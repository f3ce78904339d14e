"""Input of a loss: the trained tokens of a pack, and counts over the whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class TrainedTokens:
    """M trained tokens of E episodes. Losses divide by the step's counts, so gradients do not depend on packing."""

    logprobs: torch.Tensor  # [M] of the current model, with gradient; empty if the algorithm needs `scores`
    entropy: torch.Tensor  # [M] of the current model, with gradient
    sampled_logprobs: torch.Tensor  # [M] log-probs of the sampler
    advantages: torch.Tensor  # [M]
    rewards: torch.Tensor  # [M]
    episode_ids: torch.Tensor  # [M] index of the token's episode within the pack
    labels: torch.Tensor  # [E]
    pairs: torch.Tensor  # [P, 2] indices of the compared episodes: chosen, rejected
    step_tokens: float  # trained tokens of the whole step, or the sum of their weights
    step_episodes: int
    step_pairs: int
    reference_logprobs: torch.Tensor | None = None  # [M] log-probs of the reference model
    old_logprobs: torch.Tensor | None = None  # [M] log-probs of the model before the step
    values: torch.Tensor | None = None  # [M] of the current critic, before each token, with gradient
    old_values: torch.Tensor | None = None  # [M] of the critic before the step
    returns: torch.Tensor | None = None  # [M]
    scores: torch.Tensor | None = None  # [M] of the current reward model, at each token, with gradient
    baseline: float = 0.0  # step-wide value set by the algorithm's `prepare`
    weights: torch.Tensor | None = None  # [M] weights of the tokens in all sums; None: all 1
    # [E] trained tokens of each episode, or the sum of their weights; None: all of them are in this pack
    episode_lengths: torch.Tensor | None = None

    def apply_weights(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values times the weights of their tokens. [M] -> [M]"""
        return values if self.weights is None else values * self.weights

    def sum_weighted(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum over the pack's tokens. [M] -> []"""
        return self.apply_weights(values).sum()

    def sum_per_episode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum over each episode's tokens. [M] -> [E]"""
        return values.new_zeros(len(self.labels)).index_add(0, self.episode_ids, self.apply_weights(values))

    @property
    def lengths(self) -> torch.Tensor:
        """Return the number of trained tokens of each episode in the whole step; with token weights, the sum of their
        weights. [E]"""
        if self.episode_lengths is not None:
            return self.episode_lengths.to(self.logprobs.dtype)
        return self.sum_per_episode(torch.ones_like(self.logprobs))


# Returns the pack's share of the step's loss, and metrics that sum over packs to the step's.
Loss = Callable[[TrainedTokens], tuple[torch.Tensor, dict[str, float]]]
