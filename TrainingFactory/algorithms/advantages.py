"""Credit: from the rewards of the episodes of one task to one advantage per turn. No critic is needed, because
episodes of the same task are compared with each other.

Shapes: n members, T turns of the longest; what comes after a member's last turn is zero. Axes in front of these are
groups side by side.

    R[i, t] = outcome_i + (step rewards of i, all of them, or with credit `turn` those from t on)
    A[i, t] = R[i, t] - baseline[t]

The baseline `rloo` is the mean of R[j, t] over the other members j; `group` is that over all members, which makes A
shorter by the factor (n - 1) / n; `none` is 0. A member that has stopped stays in the baseline of later turns with its
outcome. The gradient is unbiased, also with credit `turn` if the reward of a step is settled when its turn ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from TrainingFactory.types import Trajectory

Baseline = Literal["group", "rloo", "none"]
Credit = Literal["trajectory", "turn"]

OVERLONG = "overlong_penalty"  # a part of rewards, taken off beside their outcome
TOLERANCE = 1e-6  # of the largest reward: what differs by less is equal


def reward_tables(scored: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes [n] and step rewards [n, T] of episodes that have a reward."""
    outcomes = np.zeros(len(scored))
    steps = np.zeros((len(scored), max((len(t.turns) for t in scored), default=0)))
    for member, trajectory in enumerate(scored):
        reward = trajectory.reward
        assert reward is not None and len(reward.steps) in (0, len(trajectory.turns))
        outcomes[member] = reward.outcome
        steps[member, : len(reward.steps)] = reward.steps
    return outcomes, steps


def equal(outcomes: np.ndarray) -> bool:
    """Tell whether outcomes [n] differ by no more than rounding."""
    return bool(np.ptp(outcomes) <= TOLERANCE * np.abs(outcomes).max())


def advantages(
    outcomes: np.ndarray, steps: np.ndarray, credit: Credit, baseline: Baseline, scale: bool = False
) -> np.ndarray:
    """[..., n], [..., n, T] -> [..., n, T]. With `scale` in units of the deviation of the members' whole rewards
    (n - 1 in its denominator); where those are equal nothing can be said, and all is zero."""
    members = outcomes.shape[-1]
    to_go = np.flip(np.cumsum(np.flip(steps, -1), -1), -1)
    gains = outcomes[..., None] + (to_go if credit == "turn" else to_go[..., :1])
    if baseline == "none":
        return gains * np.ones(steps.shape[-1])
    distance = gains - gains.mean(-2, keepdims=True)
    # What is below this is rounding; a deviation made of it would blow it up to the size of a reward.
    least = TOLERANCE * (np.abs(outcomes) + np.abs(steps).sum(-1)).max(-1)[..., None, None]
    distance = np.where(np.abs(distance) > least, distance, 0.0) * np.ones(steps.shape[-1])
    if baseline == "rloo":
        distance = distance * (members / (members - 1))
    if scale:
        deviation = gains[..., :1].std(-2, ddof=1, keepdims=True)  # from the first turn on: the whole reward
        distance = distance / np.where(deviation > least, deviation, np.inf)
    return distance
