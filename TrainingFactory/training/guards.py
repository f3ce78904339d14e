"""Guards that stop a run early if nothing can be learned from its steps."""

from __future__ import annotations

from dataclasses import dataclass

from TrainingFactory.training.source import StepGroups
from TrainingFactory.types import Reward

MAX_UNUSABLE_STEPS = 3  # consecutive steps
MAX_STEPS_WITHOUT_TOOLS = 8  # consecutive steps while a tool server is down, with pauses of 1, 2, 4 ... s
MAX_PAUSE_SECONDS = 30.0


@dataclass(slots=True, frozen=True)
class GuardAction:
    """Action for a step: save a checkpoint of the steps before it, warn, stop the run, or pause for a number of
    seconds."""

    saves_checkpoint: bool = False
    warning: str | None = None
    stop_reason: str | None = None
    pause_seconds: float = 0.0


class Guards:
    """Counts consecutive steps with too few scored episodes, with equal rewards, or with a sampler that does not match
    the learner. `has_rewards`: an earlier episode of the run has had a reward. If `is_replay`, the run
    does not pause for tool servers, because it calls none."""

    def __init__(
        self,
        max_equal_steps: int | None,
        *,
        has_rewards: bool = False,
        is_replay: bool = False,
        max_mismatch: float = 0.1,
        state_groups: float = 0.0,
    ) -> None:
        self._max_equal_steps, self._has_rewards, self._is_replay = max_equal_steps, has_rewards, is_replay
        self._max_mismatch, self._state_groups = max_mismatch, state_groups
        self.unusable_steps = 0
        self._equal_steps = self._mismatched_steps = 0

    def check(self, batch: StepGroups, is_last: bool) -> GuardAction:
        """Return the action for the groups of a step before its update. `is_last`: it is the run's last step."""
        self._has_rewards |= any(trajectory.reward is not None for trajectory in batch.trajectories)
        if batch.problem is None:
            self.unusable_steps = 0
            reason = (
                (self._check_state_names(batch) or self._check_equal_rewards(batch))
                if batch.is_sampled
                else None
            )
            return GuardAction(saves_checkpoint=reason is not None, stop_reason=reason)
        self.unusable_steps += 1
        has_tool_failures = any(trajectory.status == "tool_failure" for trajectory in batch.trajectories)
        reason, seconds = None, 0.0
        if self.unusable_steps >= (MAX_STEPS_WITHOUT_TOOLS if has_tool_failures else MAX_UNUSABLE_STEPS):
            reason = f"Stopped after {self.unusable_steps} consecutive unusable steps: {batch.problem}"
        elif not self._has_rewards and (is_last or not has_tool_failures):
            reason = f"Stopped because no episode of the run could be scored: {batch.problem}"
        elif has_tool_failures and not self._is_replay:
            seconds = min(2.0 ** (self.unusable_steps - 1), MAX_PAUSE_SECONDS)
        # If the problem persists, the run can resume from before the first of these steps.
        return GuardAction(self.unusable_steps == 1, batch.problem, stop_reason=reason, pause_seconds=seconds)

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
        if self._mismatched_steps < MAX_UNUSABLE_STEPS or is_last:
            return GuardAction(warning=problem)
        reason = f"Stopped after {self._mismatched_steps} steps in which {problem}"
        return GuardAction(saves_checkpoint=True, stop_reason=reason)

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
        are_equal = len({list_reward_values(reward) for reward in rewards}) == 1
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


def list_reward_values(reward: Reward) -> tuple[float, ...]:
    """Return the outcome and the step rewards, without trailing zeros, because episodes differ in their number of
    turns."""
    step_rewards = list(reward.steps)
    while step_rewards and not step_rewards[-1]:
        step_rewards.pop()
    return (reward.outcome, *step_rewards)
