"""Preference pairs from groups of scored episodes."""

from __future__ import annotations

from collections.abc import Sequence

from TrainingFactory.data import ranking
from TrainingFactory.data.samples import AllOrLast, to_samples
from TrainingFactory.types import Sample, Trajectory


def sum_rewards(trajectory: Trajectory) -> float:
    """Return the sum of outcome and step rewards of a scored episode."""
    assert trajectory.reward is not None
    return ranking.sum_rewards(trajectory.reward)


def pick_best_and_worst(group: Sequence[Trajectory]) -> tuple[Trajectory, Trajectory] | None:
    """Return the best and the worst scored episode; None if all rewards are equal or fewer than two are scored."""
    scored_trajectories = (trajectory for trajectory in group if trajectory.reward is not None)
    return ranking.pick_best_and_worst(scored_trajectories, sum_rewards)


def make_pair_samples(
    group: Sequence[Trajectory], turns: AllOrLast = "all", tokens: AllOrLast = "all"
) -> list[Sample]:
    """Return the training rows of the group's best and worst episode. They have a common `pair`, and their labels are
    the episodes' rewards."""
    rows: list[Sample] = []
    for trajectory in pick_best_and_worst(group) or ():
        pair = rows[0].pair if rows else -1
        rows += to_samples(trajectory, turns=turns, tokens=tokens, pair=pair, label=sum_rewards(trajectory))
    return rows
