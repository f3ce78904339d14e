"""Layout of an assistant turn in a chat template: the prompt before it, its end, and the place of a thought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from TrainingFactory.models import probes
from TrainingFactory.models.probes import CallStyle
from TrainingFactory.models.templates import ChatTemplate
from TrainingFactory.types import ToolCall


class AssistantTurns:
    def __init__(self, template: ChatTemplate, control_texts: Mapping[str, int]) -> None:
        placeholder = template.marks[0]
        self._template = template
        self._prompt = template.text([probes.user(placeholder)])
        self._header = self._prompt.rpartition(placeholder)[2].rstrip()
        self.thought = probes.find_thought_style(template, self._prompt, control_texts)
        self.end = probes.end_of_turn(
            template, control_texts
        )  # text of the token that ends a turn, if there is one

    def prompt_opens_thought(self, think: tuple[str, str]) -> bool:
        """Return whether the first prompt of a chat ends inside a thought with these tags."""
        return self._header.endswith(think[0])

    def render(self, outline: dict[str, Any], think: tuple[str, str]) -> str:
        """Return the template's text of an assistant's turn: from the first text that the model samples up to, but
        without, the end-of-turn token."""
        return self._cut_end(
            probes.assistant_body(self._template, self._prompt, outline, think, self.thought.key)
        )

    def render_calls(self, style: CallStyle | None, calls: Sequence[ToolCall], think: tuple[str, str]) -> str:
        """Return the template's text of a turn that consists of tool calls alone, without the end-of-turn token."""
        if style is None:
            raise ValueError("the chat template renders no tool calls")
        turn = probes.assistant_body(
            self._template, self._prompt, style.message(calls), think, self.thought.key
        )
        return self._cut_end(probes.after_thought(turn, think, self.prompt_opens_thought(think)))

    def _cut_end(self, body: str) -> str:
        return body[: body.rindex(self.end)] if self.end and self.end in body else body
