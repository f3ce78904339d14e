"""What the algorithms that learn from preferences see in a group of scored episodes."""

from __future__ import annotations

from collections.abc import Sequence

from TrainingFactory.data.samples import Which, to_samples
from TrainingFactory.types import Sample, Trajectory


def total_reward(trajectory: Trajectory) -> float:
    """Outcome and step rewards together; the episode is scored."""
    assert trajectory.reward is not None
    return trajectory.reward.outcome + sum(trajectory.reward.steps)


def best_and_worst(group: Sequence[Trajectory]) -> tuple[Trajectory, Trajectory] | None:
    """The first of the best and the first of the worst; None where the scored episodes all earned the same (up to
    rounding) or are fewer than two."""
    scored = [trajectory for trajectory in group if trajectory.reward is not None]
    if not scored:
        return None
    best, worst = max(scored, key=total_reward), min(scored, key=total_reward)
    high, low = total_reward(best), total_reward(worst)
    return None if high - low <= 1e-6 * max(abs(high), abs(low)) else (best, worst)


def rows_of_pair(
    best: Trajectory, worst: Trajectory, *, turns: Which = "all", tokens: Which = "all"
) -> list[Sample]:
    """The rows of both sides, which have the same `pair`; their labels are the rewards."""
    rows = to_samples(best, turns=turns, tokens=tokens, label=total_reward(best))
    pair = rows[0].pair
    return rows + to_samples(worst, turns=turns, tokens=tokens, pair=pair, label=total_reward(worst))
