"""Rewards of single turns: the face of `rewards/process_reward.py`, and the same for steps that are judged already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from TrainingFactory.rewards.process_reward import STEP_REWARDS, ProcessReward
from TrainingFactory.rewards.process_reward import calculate_process_reward as of_trajectory
from TrainingFactory.types import Reward, Trajectory

__all__ = ["ProcessReward", "calculate_process_reward"]
MARKS = {"correct_tool": "tool_call_correct", "clear_reasoning": "reasoning_clear"}  # rule -> mark of a step


def calculate_process_reward(
    trajectory: Trajectory | Sequence[Any],
    step_rewards: Mapping[str, float] | None = None,
    *,
    outcome: float | Reward | None = None,
    **options: Any,
) -> Reward:
    """Reward the turns of a trajectory by rules, or steps by the marks that they carry: `step.tool_call_correct` and
    `step.reasoning_clear`. Options are those of ProcessReward, for trajectories."""
    if isinstance(trajectory, Trajectory) or not isinstance(trajectory, Sequence):
        return of_trajectory(trajectory, step_rewards, outcome=outcome, **options)
    weights = {rule: weight for rule, weight in (step_rewards or STEP_REWARDS).items() if rule in MARKS}
    earned = [
        {rule: weight * _mark(step, MARKS[rule], number) for rule, weight in weights.items()}
        for number, step in enumerate(trajectory)
    ]
    known = outcome.outcome if isinstance(outcome, Reward) else outcome or 0.0
    parts = {rule: sum(step[rule] for step in earned) for rule in weights}
    return Reward(known, [sum(step.values()) for step in earned], {"outcome": known, **parts})


def _mark(step: Any, name: str, number: int) -> bool:
    value = step.get(name) if isinstance(step, Mapping) else getattr(step, name, None)
    if value is None:
        raise ValueError(f"step {number} has no {name}; a step says tool_call_correct and reasoning_clear")
    return bool(value)
