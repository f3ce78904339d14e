"""Messages and rewards in words."""

from __future__ import annotations

import json

from TrainingFactory.types import Message, Reward, Trajectory


def said(message: Message) -> list[tuple[str, str]]:
    """Return (who, what) for a message: its text, then its calls."""
    lines = [(str(message.role), message.content)] if message.content or not message.tool_calls else []
    for call in message.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        lines.append(("calls", call.error or f"{call.name} {arguments}"))
    return lines


def conversation(episode: Trajectory) -> list[tuple[str, str]]:
    """Return (who, what) for each message after the system's."""
    messages = [message for message in episode.prompt if message.role != "system"]
    for turn in episode.turns:
        messages += [turn.message, *turn.replies]
    return [line for message in messages for line in said(message)]


def reward_text(reward: Reward | None) -> str:
    """Say what an episode earned: in all, for its steps in order where they earned any, and the parts."""
    if reward is None:
        return "not scored"
    text = f"reward {reward.outcome + sum(reward.steps):g}"
    if any(reward.steps):
        steps = " ".join(f"{value:+g}" for value in reward.steps)
        text += f" (outcome {reward.outcome:g}, steps {steps})"
    return text + "".join(f", {name} {value:g}" for name, value in reward.parts.items())
