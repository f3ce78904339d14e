"""Copies of messages, tool results and sampling options, which every turn makes."""

from __future__ import annotations

import dataclasses

from tests.kits.pictures import RED, picture
from TrainingFactory.types import Message, PlacedImage, SamplingParams, ToolCall, ToolResult


def test_copies_keep_every_other_field() -> None:
    images = [PlacedImage(1, picture(RED))]
    message = Message("tool", "old", [ToolCall("look")], "call_0", "look", "a thought", images)
    result = ToolResult("old", False, "timeout", True, 2.5, [{"type": "audio"}], "call_0", images)
    params = SamplingParams(0.5, 9, (1, 2), 0.9, 7, 0.1, 3)
    for value, default in ((message, Message("user")), (result, ToolResult("")), (params, SamplingParams())):
        same = [
            field.name
            for field in dataclasses.fields(value)
            if getattr(value, field.name) == getattr(default, field.name)
        ]
        assert not same, "every field needs a value here that is not its default"

    assert message.with_content("new", []) == dataclasses.replace(message, content="new", images=[])
    assert result.with_content("new") == dataclasses.replace(result, content="new")
    assert params.for_turn(5, 8) == dataclasses.replace(params, max_tokens=5, seed=8)
