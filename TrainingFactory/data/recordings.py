"""Recorded trajectories as examples: which of them teach something, and which belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from TrainingFactory.data.conversations import Conversation
from TrainingFactory.data.ranking import total
from TrainingFactory.data.trajectories import Kept, trajectory_from_dict
from TrainingFactory.types import Trajectory

LOST = ("error", "tool_failure")  # ends that say nothing about the model


def is_recording(columns: Mapping[str, Any]) -> bool:
    return "turns" in columns and "task" in columns


def recording(columns: Mapping[str, Any], form: str) -> Conversation | str:
    """A recorded episode, or why it teaches nothing. For sft without a turn that was cut, which is no example of how
    to end one."""
    try:
        trajectory = trajectory_from_dict(dict(columns))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is not a trajectory: {error!r}") from error
    if form == "sft" and trajectory.turns and trajectory.turns[-1].completion.finish != "stop":
        trajectory = replace(trajectory, turns=trajectory.turns[:-1])
    if why := useless(trajectory, form):
        return why
    said = [message for turn in trajectory.turns for message in (turn.message, *turn.replies)]
    return Conversation(
        trajectory.group or trajectory.task.id,
        [*trajectory.prompt, *said],
        trajectory.tools,
        Kept.of(trajectory),
        context=len(trajectory.prompt),
        reward=trajectory.reward,
    )


def useless(trajectory: Trajectory, form: str) -> str | None:
    """Why an episode teaches nothing of that form."""
    if trajectory.status in LOST:
        return f"ended as {trajectory.status}"
    if not trajectory.turns:
        return "have no turn that came to its end"
    if form != "sft" and trajectory.reward is None:
        return "have no reward"
    if form == "prm" and trajectory.reward and len(trajectory.reward.steps) != len(trajectory.turns):
        return "have no reward for each turn"
    return None


def reward_of(conversation: Conversation) -> float:
    assert conversation.reward is not None
    return total(conversation.reward)
