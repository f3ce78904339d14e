"""Ranking of the episodes of a group, as the rule for all preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from TrainingFactory.types import Reward

Scored = TypeVar("Scored")
RELATIVE_TOLERANCE = 1e-6  # relative to the larger of two rewards


def sum_rewards(reward: Reward) -> float:
    """Return the sum of outcome and step rewards."""
    return reward.outcome + sum(reward.steps)


def pick_best_and_worst(
    group: Iterable[Scored], get_reward: Callable[[Scored], float]
) -> tuple[Scored, Scored] | None:
    """Return the first best and the first worst member of a group; None if all rewards are equal up to rounding."""
    members = list(group)
    if not members:
        return None
    best, worst = max(members, key=get_reward), min(members, key=get_reward)
    high, low = get_reward(best), get_reward(worst)
    return None if high - low <= RELATIVE_TOLERANCE * max(abs(high), abs(low)) else (best, worst)


def warn_if_one_sided(rewards: Sequence[float], threshold: float, key: str) -> str | None:
    """Return a warning if all rewards, or none, are above the threshold, which the option `key` sets."""
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    if not rewards or low <= threshold < high:
        return None
    sign = "positive" if low > threshold else "negative"
    text = f"all {len(rewards)} labels are {sign} at {key} {threshold:g}, so there is nothing to distinguish"
    return text if low == high else f"{text}; the rewards range from {low:g} to {high:g}"
