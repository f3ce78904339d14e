"""Demonstrations from a file: one JSON object a line, a conversation or a trajectory as rollouts save them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from TrainingFactory.data.lines import read_lines
from TrainingFactory.data.trajectories import trajectory_from_dict
from TrainingFactory.openai_form import message_from_dict, spec_from_dict
from TrainingFactory.types import Message, ToolSpec, Trajectory

FORMS = '"messages" (and "tools"), "prompt" and "completion", or a trajectory\'s "task" and "turns"'


@dataclass(slots=True)
class Conversation:
    """`recorded` is the trajectory it was, where its tokens are known."""

    id: str
    messages: list[Message]
    tools: list[ToolSpec] = field(default_factory=list)
    recorded: Trajectory | None = None


def load_conversations(path: str | Path) -> list[Conversation]:
    stem = Path(path).stem
    return read_lines(
        path, "demonstrations", f"with {FORMS}", lambda row, number: _conversation(row, f"{stem}-{number}")
    )


def _conversation(row: dict[str, Any], default_id: str) -> Conversation:
    if "turns" in row and "task" in row:
        return _from_trajectory(row)
    tools = row.get("tools") or []
    if isinstance(tools, str):  # some datasets keep them as JSON in a text
        tools = json.loads(tools)
    specs = [spec_from_dict(tool) for tool in tools]
    return Conversation(str(row.get("id", default_id)), checked(_messages(row)), specs)


def _messages(row: dict[str, Any]) -> list[Message]:
    if "messages" in row:
        rows = row["messages"]
    elif "prompt" in row and "completion" in row:
        rows = [*_as_rows(row["prompt"], "user"), *_as_rows(row["completion"], "assistant")]
    else:
        raise ValueError(
            f"has not what a demonstration needs: {FORMS}; its keys are: {', '.join(row) or 'none'}"
        )
    if not isinstance(rows, list) or not rows:
        raise ValueError('has "messages" that are not a list, or an empty one')
    try:
        return [message_from_dict(message) for message in rows]
    except ValueError as error:
        raise ValueError(f"has a bad message: {error}") from error


def _as_rows(value: Any, role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def checked(messages: Sequence[Message]) -> list[Message]:
    """Up to the last message of the assistant: what follows it teaches nothing."""
    ends = [number for number, message in enumerate(messages) if message.role == "assistant"]
    if not ends:
        raise ValueError("has no message of the assistant, so there is nothing to learn from")
    if ends[0] == 0:
        raise ValueError("begins with the assistant; a conversation begins with the system or the user")
    if any(later == earlier + 1 for earlier, later in pairwise(ends)):
        raise ValueError("has two messages of the assistant in a row")
    return list(messages[: ends[-1] + 1])


def _from_trajectory(row: dict[str, Any]) -> Conversation:
    try:
        trajectory = trajectory_from_dict(row)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"is not a trajectory: {error!r}") from error
    messages = list(trajectory.prompt)
    for turn in trajectory.turns:
        if turn.completion.finish == "stop":  # a turn that was cut is no example of how to end one
            messages += [turn.message, *turn.replies]
    return Conversation(
        trajectory.group or trajectory.task.id, checked(messages), trajectory.tools, trajectory
    )
