"""A reward that says nothing, seen before it has cost a night."""

from __future__ import annotations

from TrainingFactory.services.sources import Groups


class EqualRewards:
    """Counts steps in a row in which every episode was paid the same: nothing tells good episodes from bad ones."""

    def __init__(self, limit: int | None) -> None:
        self.limit, self.steps = limit, 0

    def problem(self, groups: Groups) -> str | None:
        """Why the run should stop after these episodes, or None."""
        rewards = [
            trajectory.reward for group in groups for trajectory in group if trajectory.reward is not None
        ]
        paid = {(reward.outcome, tuple(step for step in reward.steps if step)) for reward in rewards}
        self.steps = self.steps + 1 if len(rewards) > 1 and len(paid) == 1 else 0
        if self.limit is None or self.steps < self.limit:
            return None
        value = rewards[0].outcome + sum(rewards[0].steps)
        return (
            f"all rewards were equal ({value:g} in the last one) for {self.steps} steps in a row, which is as many as "
            "reward.max_equal_steps allows: the reward does not tell good episodes from bad ones, or the tasks are all "
            "too hard or too easy"
        )
