"""Critic-free advantages: one advantage per turn, from comparing the rewards of a task's episodes.

Shapes: n episodes (the members of a group), T turns of the longest episode; entries after a member's last turn are
zero. Leading axes are a batch of groups.

    R[i, t] = outcome_i + (sum of step rewards of i: all of them, or with credit `turn` those from turn t on)
    A[i, t] = R[i, t] - baseline[t]

The baseline `rloo` is the mean of R[j, t] over the other members j; `group` is the mean over all members, which shrinks
A by the factor (n - 1) / n; `none` is 0. A finished member stays in the baseline of later turns with its outcome. The
gradient is unbiased; with credit `turn` this requires step rewards that are fixed when their turn ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from TrainingFactory.types import Trajectory

Baseline = Literal["group", "rloo", "none"]
Credit = Literal["trajectory", "turn"]

OVERLONG_PENALTY = "overlong_penalty"  # name of the reward part; the penalty is subtracted from the outcome
REWARD_TOLERANCE = 1e-6  # relative to the largest reward: smaller differences count as equal


def make_reward_tables(trajectories: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Return the outcomes [n] and step rewards [n, T] of scored episodes."""
    outcomes = np.zeros(len(trajectories))
    step_rewards = np.zeros((len(trajectories), max((len(t.turns) for t in trajectories), default=0)))
    for member, trajectory in enumerate(trajectories):
        reward = trajectory.reward
        assert reward is not None and len(reward.steps) in (0, len(trajectory.turns))
        outcomes[member] = reward.outcome
        step_rewards[member, : len(reward.steps)] = reward.steps
    return outcomes, step_rewards


def are_rewards_equal(outcomes: np.ndarray) -> bool:
    """Return whether the outcomes [n] are equal up to rounding."""
    return bool(np.ptp(outcomes) <= REWARD_TOLERANCE * np.abs(outcomes).max())


def compute_returns(outcomes: np.ndarray, step_rewards: np.ndarray, credit: Credit) -> np.ndarray:
    """Return the returns R of outcomes [..., n] and step rewards [..., n, T]: [..., n, T], or [..., n, 1] with credit
    `trajectory`."""
    rewards_to_go = np.flip(np.cumsum(np.flip(step_rewards, -1), -1), -1)
    return outcomes[..., None] + (rewards_to_go if credit == "turn" else rewards_to_go[..., :1])


def compute_advantages(
    outcomes: np.ndarray, step_rewards: np.ndarray, credit: Credit, baseline: Baseline, scale: bool = False
) -> np.ndarray:
    """Return the advantages of turns from outcomes [..., n] and step rewards [..., n, T] as [..., n, T]. `scale`
    divides by the standard deviation (n - 1 in the denominator) of the members' total rewards; where these are equal,
    all advantages are zero."""
    group_size = outcomes.shape[-1]
    returns = compute_returns(outcomes, step_rewards, credit)
    if baseline == "none":
        return returns * np.ones(step_rewards.shape[-1])
    advantages = returns - returns.mean(-2, keepdims=True)
    # Differences below this are rounding errors; dividing by their deviation would scale them up to a reward's size.
    tolerance = REWARD_TOLERANCE * (np.abs(outcomes) + np.abs(step_rewards).sum(-1)).max(-1)[..., None, None]
    advantages = np.where(np.abs(advantages) > tolerance, advantages, 0.0) * np.ones(step_rewards.shape[-1])
    if baseline == "rloo":
        advantages = advantages * (group_size / (group_size - 1))
    if scale:
        deviation = returns[..., :1].std(-2, ddof=1, keepdims=True)  # at the first turn: the total reward
        advantages = advantages / np.where(deviation > tolerance, deviation, np.inf)
    return advantages
