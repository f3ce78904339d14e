"""What a batch of episodes was like, in a few figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import get_args

from TrainingFactory.types import Status, Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Counts over the batch, means per episode. A mean over nothing is left out, not zero."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    results = [result for turn in turns for result in turn.tool_results]
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    metrics: dict[str, float] = {"episodes": len(trajectories)}
    for status in get_args(Status):
        metrics[f"episodes/{status}"] = sum(trajectory.status == status for trajectory in trajectories)
    metrics["episodes/unscored"] = len(trajectories) - len(rewards)
    metrics["sampled_tokens"] = sum(len(turn.completion.token_ids) for turn in turns)
    metrics["tool_calls"] = len(results)
    if results:
        metrics["tool_success"] = fmean(result.ok for result in results)
    if trajectories:
        metrics["turns"] = len(turns) / len(trajectories)
    if rewards:
        metrics["reward"] = fmean(reward.outcome + sum(reward.steps) for reward in rewards)
    for part in sorted({part for reward in rewards for part in reward.parts}):
        metrics[f"reward/{part}"] = fmean(reward.parts[part] for reward in rewards if part in reward.parts)
    return metrics
