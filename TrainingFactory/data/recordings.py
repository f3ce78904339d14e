"""Recorded trajectories as examples: which of them teach something, and which belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from TrainingFactory.data.conversations import Conversation
from TrainingFactory.data.ranking import best_and_worst, total
from TrainingFactory.data.trajectories import Kept, trajectory_from_dict
from TrainingFactory.types import Trajectory

LOST = ("error", "tool_failure")  # ends that say nothing about the model


class _Group(Protocol):
    conversations: list[Conversation]


def is_recording(columns: Mapping[str, Any]) -> bool:
    return "turns" in columns and "task" in columns


def recording(columns: Mapping[str, Any], learned_only: bool) -> Conversation:
    """`learned_only`: without a turn that was cut, which is no example of how to end one."""
    try:
        trajectory = trajectory_from_dict(dict(columns))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is not a trajectory: {error!r}") from error
    return from_trajectory(trajectory, learned_only)


def from_trajectory(trajectory: Trajectory, learned_only: bool) -> Conversation:
    if learned_only and trajectory.turns and trajectory.turns[-1].completion.finish != "stop":
        trajectory = replace(trajectory, turns=trajectory.turns[:-1])
    messages = list(trajectory.prompt)
    for turn in trajectory.turns:
        messages += [turn.message, *turn.replies]
    return Conversation(
        trajectory.group or trajectory.task.id,
        messages,
        trajectory.tools,
        Kept.of(trajectory),
        context=len(trajectory.prompt),
        reward=trajectory.reward,
    )


def useless(conversation: Conversation, form: str) -> str | None:
    """Why an episode teaches nothing."""
    kept, reward = conversation.recorded, conversation.reward
    assert kept is not None
    if kept.head.status in LOST:
        return f"ended as {kept.head.status}"
    if not kept.turns:
        return "have no turn that came to its end"
    if form != "sft" and reward is None:
        return "have no reward"
    if form == "prm" and reward is not None and len(reward.steps) != len(kept.turns):
        return "have no reward for each turn"
    return None


def recordings_together(groups: Iterable[_Group]) -> Counter[str]:
    """Empties the groups in which no episode is better than another; how many episodes those had."""
    unused: Counter[str] = Counter()
    for group in groups:
        if best_and_worst(group.conversations, reward_of) is None:
            unused["are in a group with nothing better or worse in it"] += len(group.conversations)
            group.conversations = []
    return unused


def reward_of(conversation: Conversation) -> float:
    assert conversation.reward is not None
    return total(conversation.reward)
