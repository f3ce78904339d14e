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
    advantages,
    returns_to_go,
    reward_tables,
    rewards_equal,
)
from TrainingFactory.algorithms.base import BaseAlgorithm, whiten
from TrainingFactory.algorithms.branching import EpisodeTrees, TurnTable, has_forks, tree_advantages
from TrainingFactory.algorithms.correction import Correction, importance_weights
from TrainingFactory.algorithms.policy_loss import Estimator, clipped_objective, kl_terms, probability_ratio
from TrainingFactory.algorithms.state_groups import state_advantages
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
        if self.scale_rewards and self._whiten:
            raise ValueError(
                f"grpo.scale_rewards is true, but grpo.advantage={self.advantage} normalises over the whole batch; "
                "set grpo.scale_rewards to false"
            )
        if self.state_groups and (self.scale_rewards or self.advantage == "reinforce_plus_plus"):
            key = "scale_rewards=true" if self.scale_rewards else "advantage=reinforce_plus_plus"
            reason = "scales" if self.scale_rewards else "does not compare"
            raise ValueError(
                f"grpo.state_groups={self.state_groups:g} compares unscaled returns within a group, but grpo.{key} "
                f"{reason} them; remove one of the two"
            )

    @property
    def _whiten(self) -> bool:
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
        scored_trajectories = [
            trajectory for trajectory in group if trajectory.reward is not None and trajectory.turns
        ]
        is_ungrouped = self.advantage == "reinforce_plus_plus"  # no comparison within the group
        if len(scored_trajectories) < (1 if is_ungrouped else 2):
            return []
        outcomes, step_rewards = reward_tables(scored_trajectories)
        if (
            self.refill
            and self.refill_by == "outcome"
            and len(scored_trajectories) > 1
            and rewards_equal(outcomes)
        ):
            return []
        if self.overlong_length is not None:
            outcomes -= self._length_penalties(scored_trajectories, self.overlong_length)
        baseline = "none" if is_ungrouped else "rloo" if self.advantage == "rloo" else "group"
        if has_forks(scored_trajectories):
            trees = EpisodeTrees(group, scored_trajectories)
            return self._make_tree_rows(scored_trajectories, trees, outcomes, step_rewards, baseline)
        table = advantages(outcomes, step_rewards, self.credit, baseline, self.scale_rewards)
        if self.state_groups:
            members = range(len(scored_trajectories))
            returns = returns_to_go(outcomes, step_rewards, self.credit) * np.ones(step_rewards.shape)
            turn_table = TurnTable([*members], np.ones(step_rewards.shape), returns, table)
            table = self._add_state_advantages(scored_trajectories, turn_table)
        if not is_ungrouped and not table.any():
            return []
        rows = []
        for trajectory, values in zip(scored_trajectories, table.tolist(), strict=True):
            if trajectory.status != "truncated" or self.train_truncated:
                rows += to_samples(trajectory, values[: len(trajectory.turns)])
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
        returns = returns_to_go(outcomes, step_rewards, self.credit) * np.ones(step_rewards.shape)
        table = tree_advantages(trees, returns, trained_mask, baseline, self.scale_rewards)
        values = self._add_state_advantages(leaves, table) if self.state_groups else table.advantages
        if baseline != "none" and not values.any():
            return []
        rows: list[Sample] = []
        episodes: dict[int, int] = {}  # root -> number of its episode
        weights = table.weights * trained_mask
        for index, leaf in enumerate(leaves):
            count = len(leaf.turns)
            leaf_rows = to_samples(
                leaf, values[index, :count].tolist(), weights=weights[index, :count].tolist()
            )
            for row in leaf_rows:
                row.episode = row.pair = episodes.setdefault(trees.roots[index], leaf_rows[0].episode)
            rows += leaf_rows
        return rows

    def _add_state_advantages(self, episodes: Sequence[Trajectory], table: TurnTable) -> np.ndarray:
        """Return the advantages [n, T] plus the weighted advantages within the state groups."""
        leave_out = self.advantage == "rloo"
        state_terms = state_advantages(episodes, table.values, table.weights, table.roots, leave_out)
        return table.advantages + self.state_groups * state_terms

    def adjusted(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """Return copies of the episodes with the overlong penalty among the named parts of their rewards, for logs and
        files."""
        if self.overlong_length is None:
            return list(group)
        penalties = self._length_penalties(group, self.overlong_length).tolist()
        episodes = []
        for trajectory, penalty in zip(group, penalties, strict=True):
            if trajectory.reward is not None:
                # `0.0 -` avoids printing -0.0.
                parts = trajectory.reward.parts | {OVERLONG_PENALTY: 0.0 - penalty}
                trajectory = replace(trajectory, reward=replace(trajectory.reward, parts=parts))
            episodes.append(trajectory)
        return episodes

    def _length_penalties(self, group: Sequence[Trajectory], limit: int) -> np.ndarray:
        """Return the penalties, which grow linearly over the last `overlong_buffer` tokens before the limit. [n]"""
        lengths = np.array([sum(len(turn.completion.token_ids) for turn in t.turns) for t in group])
        excess = (lengths - (limit - self.overlong_buffer)) / self.overlong_buffer
        return self.overlong_penalty * np.clip(excess, 0.0, 1.0)

    def prepare(self, batches: Sequence[Batch], step: int) -> None:
        if self._whiten:
            whiten([pack for batch in batches for pack in batch.packs])

    def loss(self, tokens: TrainedTokens) -> tuple[torch.Tensor, dict[str, float]]:
        clip = (self.clip_low, self.clip_high) if self.loss_kind == "clip" else None
        old_logprobs, weight, weight_metrics = importance_weights(
            tokens, self.correction, clip, self.ratio == "sequence"
        )
        log_ratio = tokens.logprobs - old_logprobs
        if self.ratio == "sequence":
            mean_log_ratio = (tokens.per_episode(log_ratio) / tokens.lengths)[tokens.episode]
            # A gradient through the mean would give every token the mean advantage of its episode.
            log_ratio = mean_log_ratio.detach() + tokens.logprobs - tokens.logprobs.detach()
        ratio = probability_ratio(log_ratio)
        if self.loss_kind == "cispo":
            gain = ratio.clamp(max=1 + self.clip_high).detach() * tokens.advantages * tokens.logprobs
            is_clipped = ratio > 1 + self.clip_high
        else:
            low, high, dual_clip = self.clip_low, self.clip_high, self.clip_dual
            gain, is_clipped = clipped_objective(ratio, tokens.advantages, low, high, dual_clip)
        metrics = weight_metrics | {
            "clip_fraction": float(tokens.total(is_clipped)) / tokens.step_tokens,
            "logprob_diff": _mean(tokens, (tokens.logprobs - tokens.sampled).abs()),
        }
        terms = -gain * weight
        if self.kl:
            assert tokens.reference is not None
            divergence = kl_terms(tokens.logprobs, tokens.reference, self.kl_estimator)
            terms = terms + self.kl * divergence
            metrics["kl"] = _mean(tokens, divergence)
        if self.entropy:
            terms = terms - self.entropy * tokens.entropy
        return self._reduce_loss(tokens, terms), metrics

    def _reduce_loss(self, tokens: TrainedTokens, terms: torch.Tensor) -> torch.Tensor:
        """Return the pack's share of the step's loss from per-token terms. An episode of several rows counts once."""
        if self.normalization == "token":
            return tokens.total(terms) / tokens.step_tokens
        if self.normalization == "constant":
            return tokens.total(terms) / (tokens.step_episodes * self.constant_length)
        return (tokens.per_episode(terms) / tokens.lengths).sum() / tokens.step_episodes


def _mean(tokens: TrainedTokens, values: torch.Tensor) -> float:
    """Return the pack's share of the weighted mean of `values` over the step's trained tokens."""
    return float(tokens.total(values.detach())) / tokens.step_tokens
