"""Stop a run from which nothing can be learned, before it has cost a night."""

from __future__ import annotations

from dataclasses import dataclass

from TrainingFactory.training.source import StepGroups
from TrainingFactory.types import Reward

MAX_UNUSABLE = 3  # steps in a row
MAX_WITHOUT_TOOLS = 8  # where a server is down, which may come back: after pauses of 1, 2, 4 ... seconds
LONGEST_PAUSE = 30.0


@dataclass(slots=True, frozen=True)
class Finding:
    """What to do about a step: save what was learned before it, warn, stop, or wait so many seconds."""

    save: bool = False
    warning: str | None = None
    stop: str | None = None
    pause: float = 0.0


class Guards:
    """Count steps in a row of which too little could be scored, in which the reward says nothing, or whose sampler is
    not the model that learns. `scored` tells whether any episode of the run has had a reward before; a replay does not
    wait for tools that are down."""

    def __init__(
        self,
        max_equal_steps: int | None,
        *,
        scored: bool = False,
        replayed: bool = False,
        max_mismatch: float = 0.1,
    ) -> None:
        self._max_equal, self._scored, self._replayed = max_equal_steps, scored, replayed
        self._max_mismatch = max_mismatch
        self.unusable = 0
        self._equal = self._strange = 0

    def check(self, batch: StepGroups, last: bool) -> Finding:
        """Look at the groups of a step, which is the last one of the run or not."""
        self._scored |= any(trajectory.reward is not None for trajectory in batch.trajectories)
        if batch.problem is None:
            self.unusable = 0
            stop = self._equal_rewards(batch) if batch.sampled else None
            return Finding(save=stop is not None, stop=stop)
        self.unusable += 1
        down = any(trajectory.status == "tool_failure" for trajectory in batch.trajectories)
        stop, pause = None, 0.0
        if self.unusable >= (MAX_WITHOUT_TOOLS if down else MAX_UNUSABLE):
            stop = f"stopped after {self.unusable} steps that cannot be used: {batch.problem}"
        elif not self._scored and (last or not down):
            stop = f"nothing was learned, because no episode of the run could be scored: {batch.problem}"
        elif down and not self._replayed:
            pause = min(2.0 ** (self.unusable - 1), LONGEST_PAUSE)
        # If it does not get better, the run can go on from before the first of these steps.
        return Finding(save=self.unusable == 1, warning=batch.problem, stop=stop, pause=pause)

    def updated(self, metrics: dict[str, float], last: bool) -> Finding:
        """Look at what the update of a step has measured; a step in which nothing fresh was trained says nothing."""
        found = metrics.get("mismatch")
        if found is None:
            return Finding()
        self._strange = 0 if found <= self._max_mismatch else self._strange + 1  # also where it is no number
        if not self._strange:
            return Finding()
        problem = (
            f"for the same weights the sampler's log-probs are {found:.3g} a token away from the learner's, which is "
            f"over optimization.max_mismatch {self._max_mismatch:g} (bfloat16 alone makes 0.004 to 0.009): it computes "
            "with other weights or more coarsely, and what it plays is not what is trained. Look at model.dtype and "
            "sampling.engine_options (dtype, quantization), and compare with sampling.engine=native"
        )
        if self._strange < MAX_UNUSABLE or last:
            return Finding(warning=problem)
        return Finding(save=True, stop=f"stopped after {self._strange} steps in which {problem}")

    def _equal_rewards(self, batch: StepGroups) -> str | None:
        """Return why the run should stop: no group taught anything for too long, or every episode was rewarded the
        same, from which algorithms without groups would learn as well."""
        rewards = [each.reward for each in batch.trajectories if each.reward is not None]
        same = len({_amounts(reward) for reward in rewards}) == 1
        self._equal = self._equal + 1 if len(rewards) > 1 and (same or not batch.rows) else 0
        if self._max_equal is None or self._equal < self._max_equal:
            return None
        what = "no episode was rewarded better than the others of its task"
        if same:
            what = f"all rewards were equal ({rewards[0].outcome + sum(rewards[0].steps):g} in the last one)"
        return (
            f"{what} for {self._equal} steps in a row, which is as many as reward.max_equal_steps allows: the reward "
            "does not tell good episodes from bad ones, or the tasks are all too hard or too easy"
        )


def _amounts(reward: Reward) -> tuple[float, ...]:
    """Return outcome and step rewards, without the zeros at the end: an episode may have fewer turns."""
    steps = list(reward.steps)
    while steps and not steps[-1]:
        steps.pop()
    return (reward.outcome, *steps)
