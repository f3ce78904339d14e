"""Tell which episodes of a group are better: the one rule for pairs, whatever they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from TrainingFactory.types import Reward

Scored = TypeVar("Scored")
ROUNDING = 1e-6  # of the larger of two rewards


def total(reward: Reward) -> float:
    """Return outcome and step rewards together."""
    return reward.outcome + sum(reward.steps)


def best_and_worst(
    group: Iterable[Scored], reward: Callable[[Scored], float]
) -> tuple[Scored, Scored] | None:
    """Return the first of the best and the first of the worst; None where all earned the same, up to rounding."""
    members = list(group)
    if not members:
        return None
    best, worst = max(members, key=reward), min(members, key=reward)
    high, low = reward(best), reward(worst)
    return None if high - low <= ROUNDING * max(abs(high), abs(low)) else (best, worst)


def one_sided(rewards: Sequence[float], threshold: float, key: str) -> str | None:
    """Return what to say where none of the rewards is over the threshold, which `key` sets, or all are."""
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    if not rewards or low <= threshold < high:
        return None
    which = "good" if low > threshold else "bad"
    told = f"all {len(rewards)} labels are {which} where {key} is {threshold:g}, so there is nothing to tell apart"
    return told if low == high else f"{told}; the rewards go from {low:g} to {high:g}"
