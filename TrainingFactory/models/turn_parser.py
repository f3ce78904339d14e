"""Parsing of an assistant's turn: its thoughts, its text and its tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from TrainingFactory.models.families import Family
from TrainingFactory.types import Message, ToolSpec


class TurnParser:
    def __init__(self, family: Family, control_texts: Mapping[str, int]) -> None:
        self._family = family
        self._think_start, self._think_end = family.think
        self._starts_as_token = any(self._think_start.startswith(token) for token in control_texts)
        self._ends_as_token = self._think_end in control_texts

    def parse(self, text: str, opens_thought: bool, tools: Sequence[ToolSpec]) -> Message:
        """Parse a turn. Calls inside its reasoning are ignored."""
        if self._family.read_turn is not None:
            return self._family.read_turn(text, tools)
        reasoning, text = self._split_thoughts(text, opens_thought)
        content, calls = self._family.read_calls(text, tools)
        return Message("assistant", content.strip(), calls, reasoning=reasoning)

    def _split_thoughts(self, text: str, opens_thought: bool) -> tuple[str | None, str]:
        """Return the thoughts of a turn (None if there are none) and its other text. A thought without an end tag
        extends to the end of the turn."""
        start, end = self._think_start, self._think_end
        thoughts = list[str]()
        begins_with_thought = text.lstrip().startswith(start)
        has_end = end in text and self._ends_as_token
        starts_later = self._starts_as_token and start in text.partition(end)[0] and not begins_with_thought
        if opens_thought or begins_with_thought or (has_end and not starts_later):
            thought, _, text = text.lstrip().removeprefix(start).partition(end)
            thoughts.append(thought.strip())
        while self._starts_as_token and start in text:
            text_before, _, text_after = text.partition(start)
            thought, _, text_after = text_after.partition(end)
            thoughts.append(thought.strip())
            text = text_before + text_after
        return "\n".join(thoughts) if thoughts else None, text
