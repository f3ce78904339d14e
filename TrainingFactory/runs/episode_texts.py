"""Messages, episodes and rewards as text for terminals and pages."""

from __future__ import annotations

import json
from collections.abc import Sequence

from TrainingFactory.common.images import as_text, label
from TrainingFactory.types import Message, Reward, Trajectory


def format_content(message: Message) -> str:
    """Return the text of a message, with labels for its images."""
    return as_text(message.content, message.images, label)


def list_message_lines(message: Message) -> list[tuple[str, str]]:
    """Return a message as (speaker, text) lines: its content, with labels for images, then its tool calls."""
    content = format_content(message)
    lines = [(str(message.role), content)] if content or not message.tool_calls else []
    return lines + _format_calls(message)


def _format_calls(message: Message) -> list[tuple[str, str]]:
    lines = []
    for call in message.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        lines.append(("calls", call.error or f"{call.name} {arguments}"))
    return lines


def list_conversation_lines(episode: Trajectory) -> list[tuple[str, str]]:
    """Return (speaker, text) lines for all messages except the system prompt."""
    return [line for message in _list_messages(episode) for line in list_message_lines(message)]


def list_lines_with_images(episode: Trajectory) -> list[tuple[str, str | Message]]:
    """Return the lines of `list_conversation_lines`, with messages instead of texts so that pages can show images."""
    lines: list[tuple[str, str | Message]] = []
    for message in _list_messages(episode):
        if message.content or message.images or not message.tool_calls:
            lines.append((str(message.role), message))
        lines += _format_calls(message)
    return lines


def _list_messages(episode: Trajectory) -> list[Message]:
    messages = [message for message in episode.prompt if message.role != "system"]
    for turn in episode.turns:
        messages += [turn.message, *turn.replies]
    return messages


def format_reward(reward: Reward | None) -> str:
    """Return the total reward as text, with the reward of each step (if any is not 0) and each part."""
    if reward is None:
        return "not scored"
    text = f"reward {reward.outcome + sum(reward.steps):g}"
    if any(reward.steps):
        step_texts = " ".join(f"{value:+g}" for value in reward.steps)
        text += f" (outcome {reward.outcome:g}, steps {step_texts})"
    return text + "".join(f", {name} {value:g}" for name, value in reward.parts.items())


def pick_best_and_worst(episodes: Sequence[Trajectory]) -> dict[str, Trajectory]:
    """Return the episodes with the highest and lowest reward, by label; a single one if all rewards are equal."""
    scored_pairs = [(e.reward.outcome + sum(e.reward.steps), e) for e in episodes if e.reward]
    if not scored_pairs:
        return {"not scored": episodes[0]} if episodes else {}
    ranking = sorted(scored_pairs, key=lambda pair: -pair[0])
    are_equal = ranking[0][0] == ranking[-1][0]
    return {"all alike": ranking[0][1]} if are_equal else {"best": ranking[0][1], "worst": ranking[-1][1]}


def format_ending(episode: Trajectory) -> str:
    error = f"; {episode.error}" if episode.error else ""
    return f"{episode.status}, {format_reward(episode.reward)}{error}"
