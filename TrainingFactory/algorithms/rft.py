"""Rejection sampling fine-tuning (RFT): sample episodes, keep those with a high reward, and train on them as
demonstrations.

    L = - sum of w log p / sum of w        over the sampled tokens of the kept episodes of a mini-batch

    w = 1 / n     n: tokens of the kept episodes of the same task      (`balance`: equal weight per task)
    w = 1                                                              (otherwise: equal weight per token)

`dedupe` keeps one of a task's episodes with the same calls and the same answer. Truncated episodes are dropped unless
`train_truncated`, because they do not show how to end. With a `correction`, for off-policy tokens, log p is also
multiplied by the weight of `correction.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.correction import Correction, compute_importance_weights
from TrainingFactory.algorithms.preferences import sum_rewards
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.data.packing import Batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory


@dataclass(slots=True, frozen=True)
class RFT(BaseAlgorithm):
    threshold: float = 1.0
    best_of: int | None = None  # None: keep all that reach the threshold
    dedupe: bool = True
    balance: bool = True
    train_truncated: bool = False
    correction: Correction | None = None  # set if the sampler is off-policy

    @property
    def needs(self) -> frozenset[str]:
        inputs = {
            "old": self.correction is not None,
            "lengths": self.correction is None or self.correction.level == "token",
        }
        return frozenset(name for name, is_needed in inputs.items() if is_needed)

    def accepted(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Return a task's episodes to train on, best first."""
        accepted_episodes = [
            episode
            for episode in group
            if episode.reward is not None and sum_rewards(episode) >= self.threshold
            if episode.status != "truncated" or self.train_truncated
            if not all(turn.masked for turn in episode.turns)
        ]
        ranked_episodes = sorted(accepted_episodes, key=sum_rewards, reverse=True)  # ties keep their order
        if self.dedupe:
            episode_by_actions: dict[tuple[str, ...], Trajectory] = {}
            for episode in ranked_episodes:
                episode_by_actions.setdefault(_make_action_key(episode), episode)
            ranked_episodes = list(episode_by_actions.values())
        return ranked_episodes[: self.best_of]

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        episodes = self.accepted(group)
        turns = [turn for episode in episodes for turn in episode.turns if not turn.masked]
        num_tokens = sum(len(turn.completion.token_ids) for turn in turns)
        weight = 1 / num_tokens if self.balance and num_tokens else 1.0
        return [row for episode in episodes for row in to_samples(episode, [weight] * len(episode.turns))]

    def prepare(self, batches: Sequence[Batch], step: int) -> None:
        """Scale the weights w, stored as advantages, to mean 1 over the tokens of each optimizer step."""
        for batch in batches:
            total_weight = float(sum(pack.advantages.sum(dtype=float) for pack in batch.packs))
            for pack in batch.packs:
                pack.advantages *= batch.num_tokens / total_weight

    def loss(self, tokens: TrainedTokens) -> tuple[torch.Tensor, dict[str, float]]:
        _, weights, metrics = compute_importance_weights(tokens, self.correction)
        return -(tokens.advantages * tokens.logprobs * weights).sum() / tokens.step_tokens, metrics


def _make_action_key(trajectory: Trajectory) -> tuple[str, ...]:
    """Return the key by which `dedupe` compares episodes: the tool calls in order, and the final text."""
    calls = [
        json.dumps([call.name, call.arguments], sort_keys=True, default=str)
        for turn in trajectory.turns
        for call in turn.message.tool_calls
    ]
    return (*calls, trajectory.turns[-1].message.content.strip())
