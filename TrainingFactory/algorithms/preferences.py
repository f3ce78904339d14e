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


def rows_of_pair(
    best: Trajectory, worst: Trajectory, *, turns: Which = "all", tokens: Which = "all"
) -> list[Sample]:
    """The rows of both sides, which have the same `pair`; their labels are the rewards."""
    rows = to_samples(best, turns=turns, tokens=tokens, label=total_reward(best))
    pair = rows[0].pair
    return rows + to_samples(worst, turns=turns, tokens=tokens, pair=pair, label=total_reward(worst))
