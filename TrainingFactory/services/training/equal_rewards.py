"""A reward that says nothing, seen before it has cost a night."""

from __future__ import annotations

from TrainingFactory.services.training.source import Groups
from TrainingFactory.types import Reward


class EqualRewards:
    """Counts steps in a row in which nothing tells good episodes from bad ones: no group taught anything, or every
    episode was paid the same, from which algorithms without groups would learn as well."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.steps = limit, 0

    def problem(self, groups: Groups, teaching: int) -> str | None:
        """Why the run should stop after these episodes, of which so many groups taught something, or None."""
        rewards = [
            trajectory.reward for group in groups for trajectory in group if trajectory.reward is not None
        ]
        same = len({_paid(reward) for reward in rewards}) == 1
        self.steps = self.steps + 1 if len(rewards) > 1 and (same or not teaching) else 0
        if self.limit is None or self.steps < self.limit:
            return None
        what = "no episode was paid better than the others of its task"
        if same:
            what = f"all rewards were equal ({rewards[0].outcome + sum(rewards[0].steps):g} in the last one)"
        return (
            f"{what} for {self.steps} steps in a row, which is as many as reward.max_equal_steps allows: the reward "
            "does not tell good episodes from bad ones, or the tasks are all too hard or too easy"
        )


def _paid(reward: Reward) -> tuple[float, ...]:
    """Turns that earned nothing at the end do not count: an episode may have fewer."""
    steps = list(reward.steps)
    while steps and not steps[-1]:
        steps.pop()
    return (reward.outcome, *steps)
