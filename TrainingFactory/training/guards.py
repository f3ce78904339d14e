"""Guards that stop a run early if nothing can be learned from its steps."""

from __future__ import annotations

from dataclasses import dataclass

from TrainingFactory.training.source import StepGroups
from TrainingFactory.types import Reward

MAX_UNUSABLE = 3  # consecutive steps
MAX_WITHOUT_TOOLS = 8  # consecutive steps while a tool server is down, with pauses of 1, 2, 4 ... seconds
LONGEST_PAUSE = 30.0


@dataclass(slots=True, frozen=True)
class GuardAction:
    """Action for a step: save a checkpoint of the steps before it, warn, stop the run, or pause for a number of
    seconds."""

    save: bool = False
    warning: str | None = None
    stop: str | None = None
    pause: float = 0.0


class Guards:
    """Counts consecutive steps with too few scored episodes, with equal rewards, or with a sampler that does not match
    the learner. `has_rewards`: an earlier episode of the run has had a reward. A `replayed` run does not pause for tool
    servers, because it calls none."""

    def __init__(
        self,
        max_equal_steps: int | None,
        *,
        has_rewards: bool = False,
        replayed: bool = False,
        max_mismatch: float = 0.1,
        state_groups: float = 0.0,
    ) -> None:
        self._max_equal_steps, self._has_rewards, self._replayed = max_equal_steps, has_rewards, replayed
        self._max_mismatch, self._state_groups = max_mismatch, state_groups
        self.unusable_steps = 0
        self._equal_steps = self._mismatched_steps = 0

    def check(self, batch: StepGroups, is_last: bool) -> GuardAction:
        """Return the action for the groups of a step before its update. `is_last`: it is the run's last step."""
        self._has_rewards |= any(trajectory.reward is not None for trajectory in batch.trajectories)
        if batch.problem is None:
            self.unusable_steps = 0
            stop = (
                (self._check_state_names(batch) or self._check_equal_rewards(batch))
                if batch.sampled
                else None
            )
            return GuardAction(save=stop is not None, stop=stop)
        self.unusable_steps += 1
        has_tool_failures = any(trajectory.status == "tool_failure" for trajectory in batch.trajectories)
        stop, pause = None, 0.0
        if self.unusable_steps >= (MAX_WITHOUT_TOOLS if has_tool_failures else MAX_UNUSABLE):
            stop = f"Stopped after {self.unusable_steps} consecutive unusable steps: {batch.problem}"
        elif not self._has_rewards and (is_last or not has_tool_failures):
            stop = f"Stopped because no episode of the run could be scored: {batch.problem}"
        elif has_tool_failures and not self._replayed:
            pause = min(2.0 ** (self.unusable_steps - 1), LONGEST_PAUSE)
        # If the problem persists, the run can resume from before the first of these steps.
        return GuardAction(save=self.unusable_steps == 1, warning=batch.problem, stop=stop, pause=pause)

    def check_update(self, metrics: dict[str, float], is_last: bool) -> GuardAction:
        """Return the action for the mismatch between sampler and learner that an update measured. A step without tokens
        sampled by the current weights has no mismatch value."""
        mismatch = metrics.get("mismatch")
        if mismatch is None:
            return GuardAction()
        self._mismatched_steps = 0 if mismatch <= self._max_mismatch else self._mismatched_steps + 1  # or NaN
        if not self._mismatched_steps:
            return GuardAction()
        problem = (
            f"the log-probs of sampler and learner differ by {mismatch:.3g} per token for the same weights, more than "
            f"optimization.max_mismatch={self._max_mismatch:g} (bfloat16 alone causes 0.004 to 0.009). The sampler has "
            "other weights or a lower precision than the learner. Check model.dtype and sampling.engine_options "
            "(dtype, quantization), and compare with sampling.engine=native"
        )
        if self._mismatched_steps < MAX_UNUSABLE or is_last:
            return GuardAction(warning=problem)
        return GuardAction(save=True, stop=f"Stopped after {self._mismatched_steps} steps in which {problem}")

    def _check_state_names(self, batch: StepGroups) -> str | None:
        """Return the reason to stop the run if turns are compared by state, but no turn of the step has the name of a
        state; else None."""
        turns = [turn for trajectory in batch.trajectories for turn in trajectory.turns]
        if not self._state_groups or not turns or any(turn.state is not None for turn in turns):
            return None
        return (
            f"Stopped because grpo.state_groups={self._state_groups:g} compares turns in the same state, but none of "
            f"{len(turns)} turns names its state. Give the environment a property `state` that returns a string, or "
            "set grpo.state_groups=0"
        )

    def _check_equal_rewards(self, batch: StepGroups) -> str | None:
        """Return the reason to stop the run after `max_equal_steps` consecutive steps in which no group gave training
        rows or all rewards were equal (algorithms without groups would train on those too); else None."""
        rewards = [trajectory.reward for trajectory in batch.trajectories if trajectory.reward is not None]
        are_equal = len({reward_amounts(reward) for reward in rewards}) == 1
        self._equal_steps = self._equal_steps + 1 if len(rewards) > 1 and (are_equal or not batch.rows) else 0
        if self._max_equal_steps is None or self._equal_steps < self._max_equal_steps:
            return None
        problem = "the rewards within every group were equal"
        if are_equal:
            problem = (
                f"all rewards were equal ({rewards[0].outcome + sum(rewards[0].steps):g} in the last one)"
            )
        return (
            f"Stopped because {problem} for {self._equal_steps} consecutive steps (reward.max_equal_steps). The reward "
            "does not distinguish good episodes from bad ones, or the tasks are all too hard or too easy"
        )


def reward_amounts(reward: Reward) -> tuple[float, ...]:
    """Return the outcome and the step rewards, without trailing zeros, because episodes differ in their number of
    turns."""
    steps = list(reward.steps)
    while steps and not steps[-1]:
        steps.pop()
    return (reward.outcome, *steps)
