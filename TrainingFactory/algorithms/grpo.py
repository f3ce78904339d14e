"""GRPO and variants: a policy gradient whose baseline is the reward of the task's other episodes.

    L = -mean over tokens of v min(w A, clip(w, 1 - low, 1 + high) A)  +  kl * KL(now, reference)  -  entropy * H

A is the advantage of the token's turn (`advantages.py`). w = p_now / p_sampled is the token's ratio; with ratio
`sequence` it is the geometric mean over the episode, with the gradient of the token's own ratio (GSPO-token). v is 1.
Where A < 0, the minimum is at least `clip_dual` A. The loss `cispo` replaces the minimum by
min(w, 1 + high) A log p_now, with no gradient through w. With a `correction`, for off-policy tokens, w = p_now / p_old
and v is the weight of `correction.py`.

With advantage `reinforce_plus_plus`, A is the reward, whitened over all trained tokens of the step; with
`reinforce_plus_plus_baseline`, A is the whitened `group` advantage. Groups with identical rewards have no gradient and
are dropped, except with `reinforce_plus_plus`. Unscored episodes are always dropped. With `state_groups`, A has a
second term, `state_groups` times the advantage within the turn's state (`state_groups.py`).

Forked episodes get the advantages and token weights of `branching.py`: all sums and means over tokens are weighted, and
a tree of episodes counts as one episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from TrainingFactory.algorithms.advantages import (
    OVERLONG_PENALTY,
    Baseline,
    Credit,
    are_rewards_equal,
    compute_advantages,
    compute_returns,
    make_reward_tables,
)
from TrainingFactory.algorithms.base import BaseAlgorithm, whiten_advantages
from TrainingFactory.algorithms.branching import EpisodeTrees, TurnTable, compute_tree_advantages, has_forks
from TrainingFactory.algorithms.correction import Correction, compute_importance_weights
from TrainingFactory.algorithms.policy_loss import Estimator, clip_objective, compute_ratio, estimate_kl
from TrainingFactory.algorithms.state_groups import compute_state_advantages
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
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
    state_groups: float = 0.0  # weight of the advantage within the turn's state; 0: off
    normalization: Normalization = "token"
    constant_length: int = 1024
    loss_kind: Loss = "clip"
    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28  # above clip_low: unlikely tokens may grow faster (clip-higher)
    clip_dual: float | None = 3.0  # None: no dual clip
    kl: float = 0.0
    kl_estimator: Estimator = "k3"
    entropy: float = 0.0
    train_truncated: bool = True  # whether episodes cut by a length limit are trained on
    overlong_length: int | None = None
    overlong_buffer: int = 128
    overlong_penalty: float = 1.0
    refill: int = 0  # rounds of resampling; done by the episode source
    refill_by: Literal["reward", "outcome"] = "reward"
    correction: Correction | None = None  # set if the sampler is off-policy

    def __post_init__(self) -> None:
        """Reject contradictory options; the config checks the range of each option."""
        if self.overlong_length is not None and self.overlong_buffer > self.overlong_length:
            limit = f"grpo.overlong_length ({self.overlong_length})"
            raise ValueError(f"grpo.overlong_buffer is {self.overlong_buffer}; it must be at most {limit}")
        if self.scale_rewards and self._whitens_advantages:
            raise ValueError(
                f"grpo.scale_rewards is true, but grpo.advantage={self.advantage} normalises over the whole batch; "
                "set grpo.scale_rewards to false"
            )
        if self.state_groups and (self.scale_rewards or self.advantage == "reinforce_plus_plus"):
            conflict = "scale_rewards=true" if self.scale_rewards else "advantage=reinforce_plus_plus"
            effect = "scales" if self.scale_rewards else "does not compare"
            raise ValueError(
                f"grpo.state_groups={self.state_groups:g} compares unscaled returns within a group, but "
                f"grpo.{conflict} {effect} them; remove one of the two"
            )

    @property
    def _whitens_advantages(self) -> bool:
        return self.advantage.startswith("reinforce_plus_plus")

    @property
    def needs(self) -> frozenset[str]:
        is_sequence_level = self.correction is not None and self.correction.level == "sequence"
        inputs = {
            "reference": self.kl > 0,
            "old": self.correction is not None,
            "lengths": self.ratio == "token" and not is_sequence_level,
        }
        return frozenset(name for name, is_needed in inputs.items() if is_needed)

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        scored_episodes = [episode for episode in group if episode.reward is not None and episode.turns]
        is_ungrouped = self.advantage == "reinforce_plus_plus"  # no comparison within the group
        if len(scored_episodes) < (1 if is_ungrouped else 2):
            return []
        outcomes, step_rewards = make_reward_tables(scored_episodes)
        if (
            self.refill
            and self.refill_by == "outcome"
            and len(scored_episodes) > 1
            and are_rewards_equal(outcomes)
        ):
            return []
        if self.overlong_length is not None:
            outcomes -= self._compute_length_penalties(scored_episodes, self.overlong_length)
        baseline = "none" if is_ungrouped else "rloo" if self.advantage == "rloo" else "group"
        if has_forks(scored_episodes):
            trees = EpisodeTrees(group, scored_episodes)
            return self._make_tree_rows(scored_episodes, trees, outcomes, step_rewards, baseline)
        advantages = compute_advantages(outcomes, step_rewards, self.credit, baseline, self.scale_rewards)
        if self.state_groups:
            members = range(len(scored_episodes))
            returns = compute_returns(outcomes, step_rewards, self.credit) * np.ones(step_rewards.shape)
            turn_table = TurnTable([*members], np.ones(step_rewards.shape), returns, advantages)
            advantages = self._add_state_advantages(scored_episodes, turn_table)
        if not is_ungrouped and not advantages.any():
            return []
        rows = []
        for trajectory, row_advantages in zip(scored_episodes, advantages.tolist(), strict=True):
            if trajectory.status != "truncated" or self.train_truncated:
                rows += to_samples(trajectory, row_advantages[: len(trajectory.turns)])
        return rows

    def _make_tree_rows(
        self,
        leaves: Sequence[Trajectory],
        trees: EpisodeTrees,
        outcomes: np.ndarray,
        step_rewards: np.ndarray,
        baseline: Baseline,
    ) -> list[Sample]:
        """Return the rows of a group with forks. All rows of a tree are one episode."""
        if baseline != "none" and len(set(trees.roots)) < 2:
            return []
        trained_mask = np.zeros(step_rewards.shape, bool)
        for index, leaf in enumerate(leaves):
            is_trained = self.train_truncated or leaf.status != "truncated"
            trained_mask[index, : len(leaf.turns)] = [is_trained and not turn.masked for turn in leaf.turns]
        returns = compute_returns(outcomes, step_rewards, self.credit) * np.ones(step_rewards.shape)
        table = compute_tree_advantages(trees, returns, trained_mask, baseline, self.scale_rewards)
        advantages = self._add_state_advantages(leaves, table) if self.state_groups else table.advantages
        if baseline != "none" and not advantages.any():
            return []
        rows: list[Sample] = []
        episode_by_root: dict[int, int] = {}  # root -> number of its episode
        weights = table.weights * trained_mask
        for index, leaf in enumerate(leaves):
            num_turns = len(leaf.turns)
            leaf_rows = to_samples(
                leaf, advantages[index, :num_turns].tolist(), weights=weights[index, :num_turns].tolist()
            )
            for row in leaf_rows:
                row.episode = row.pair = episode_by_root.setdefault(trees.roots[index], leaf_rows[0].episode)
            rows += leaf_rows
        return rows

    def _add_state_advantages(self, episodes: Sequence[Trajectory], table: TurnTable) -> np.ndarray:
        """Return the advantages [n, T] plus the weighted advantages within the state groups."""
        is_rloo = self.advantage == "rloo"
        state_terms = compute_state_advantages(episodes, table.values, table.weights, table.roots, is_rloo)
        return table.advantages + self.state_groups * state_terms

    def adjusted(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Return copies of the episodes with the overlong penalty among the named parts of their rewards, for logs and
        files."""
        if self.overlong_length is None:
            return list(group)
        penalties = self._compute_length_penalties(group, self.overlong_length).tolist()
        adjusted_episodes = []
        for trajectory, penalty in zip(group, penalties, strict=True):
            if trajectory.reward is not None:
                # `0.0 -` avoids printing -0.0.
                reward_parts = trajectory.reward.parts | {OVERLONG_PENALTY: 0.0 - penalty}
                trajectory = replace(trajectory, reward=replace(trajectory.reward, parts=reward_parts))
            adjusted_episodes.append(trajectory)
        return adjusted_episodes

    def _compute_length_penalties(self, group: Sequence[Trajectory], max_tokens: int) -> np.ndarray:
        """Return the penalties, which grow linearly over the last `overlong_buffer` tokens before the limit. [n]"""
        lengths = np.array([sum(len(turn.completion.token_ids) for turn in t.turns) for t in group])
        excess_ratio = (lengths - (max_tokens - self.overlong_buffer)) / self.overlong_buffer
        return self.overlong_penalty * np.clip(excess_ratio, 0.0, 1.0)

    def prepare(self, batches: Sequence[Batch], step: int) -> None:
        if self._whitens_advantages:
            whiten_advantages([pack for batch in batches for pack in batch.packs])

    def loss(self, tokens: TrainedTokens) -> tuple[torch.Tensor, dict[str, float]]:
        clip = (self.clip_low, self.clip_high) if self.loss_kind == "clip" else None
        old_logprobs, weights, weight_metrics = compute_importance_weights(
            tokens, self.correction, clip, self.ratio == "sequence"
        )
        log_ratio = tokens.logprobs - old_logprobs
        if self.ratio == "sequence":
            mean_log_ratio = (tokens.sum_per_episode(log_ratio) / tokens.lengths)[tokens.episode_ids]
            # A gradient through the mean would give every token the mean advantage of its episode.
            log_ratio = mean_log_ratio.detach() + tokens.logprobs - tokens.logprobs.detach()
        ratio = compute_ratio(log_ratio)
        if self.loss_kind == "cispo":
            gain = ratio.clamp(max=1 + self.clip_high).detach() * tokens.advantages * tokens.logprobs
            is_clipped = ratio > 1 + self.clip_high
        else:
            low, high, dual_clip = self.clip_low, self.clip_high, self.clip_dual
            gain, is_clipped = clip_objective(ratio, tokens.advantages, low, high, dual_clip)
        metrics = weight_metrics | {
            "clip_fraction": float(tokens.sum_weighted(is_clipped)) / tokens.step_tokens,
            "logprob_diff": _compute_mean(tokens, (tokens.logprobs - tokens.sampled_logprobs).abs()),
        }
        token_losses = -gain * weights
        if self.kl:
            assert tokens.reference_logprobs is not None
            divergence = estimate_kl(tokens.logprobs, tokens.reference_logprobs, self.kl_estimator)
            token_losses = token_losses + self.kl * divergence
            metrics["kl"] = _compute_mean(tokens, divergence)
        if self.entropy:
            token_losses = token_losses - self.entropy * tokens.entropy
        return self._reduce_loss(tokens, token_losses), metrics

    def _reduce_loss(self, tokens: TrainedTokens, token_losses: torch.Tensor) -> torch.Tensor:
        """Return the pack's share of the step's loss from per-token terms. An episode of several rows counts once."""
        if self.normalization == "token":
            return tokens.sum_weighted(token_losses) / tokens.step_tokens
        if self.normalization == "constant":
            return tokens.sum_weighted(token_losses) / (tokens.step_episodes * self.constant_length)
        return (tokens.sum_per_episode(token_losses) / tokens.lengths).sum() / tokens.step_episodes


def _compute_mean(tokens: TrainedTokens, values: torch.Tensor) -> float:
    """Return the pack's share of the weighted mean of `values` over the step's trained tokens."""
    return float(tokens.sum_weighted(values.detach())) / tokens.step_tokens
