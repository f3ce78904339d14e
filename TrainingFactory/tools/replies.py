"""Messages that tell the model the results of its tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from TrainingFactory.common.images import LIMITS, limit_images
from TrainingFactory.types import Message, ToolCall, ToolResult


def make_tool_messages(calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[Message]:
    """Return one message per call; a text with the reason replaces each image beyond a turn's limit."""
    messages: list[Message] = []
    max_images = LIMITS.max_per_turn
    for call, result in zip(calls, results, strict=True):
        content, images = (
            limit_images(result.images, result.content, max_images) if result.images else (result.content, [])
        )
        max_images -= len(images)
        messages.append(Message("tool", content, tool_call_id=call.id, name=call.name, images=images))
    return messages
