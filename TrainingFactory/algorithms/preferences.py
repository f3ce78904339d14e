"""What the algorithms that learn from preferences see in a group of scored episodes."""

from __future__ import annotations

from collections.abc import Sequence

from TrainingFactory.data import ranking
from TrainingFactory.data.samples import Which, to_samples
from TrainingFactory.types import Sample, Trajectory


def total_reward(trajectory: Trajectory) -> float:
    """Outcome and step rewards together; the episode is scored."""
    assert trajectory.reward is not None
    return ranking.total(trajectory.reward)


def best_and_worst(group: Sequence[Trajectory]) -> tuple[Trajectory, Trajectory] | None:
    """Of those that are scored; None where all earned the same or fewer than two are."""
    scored = (trajectory for trajectory in group if trajectory.reward is not None)
    return ranking.best_and_worst(scored, total_reward)


def rows_of_pair(group: Sequence[Trajectory], turns: Which = "all", tokens: Which = "all") -> list[Sample]:
    """Return the rows of the best and the worst, which have the same `pair`; their labels are the rewards."""
    rows: list[Sample] = []
    for each in best_and_worst(group) or ():
        number = rows[0].pair if rows else -1
        rows += to_samples(each, turns=turns, tokens=tokens, pair=number, label=total_reward(each))
    return rows
