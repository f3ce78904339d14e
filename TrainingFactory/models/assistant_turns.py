"""Layout of an assistant turn in a chat template: the prompt before it, its end, and the position of a thought."""

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
        self._prompt = template.render([probes.make_user_turn(placeholder)])
        self._header = self._prompt.rpartition(placeholder)[2].rstrip()
        self.thought_style = probes.find_thought_style(template, self._prompt, control_texts)
        # Text of the end-of-turn token, if there is one.
        self.end_text = probes.find_turn_end(template, control_texts)

    def prompt_opens_thought(self, think_tags: tuple[str, str]) -> bool:
        """Return whether the first prompt of a chat ends with the opening tag of a thought."""
        return self._header.endswith(think_tags[0])

    def render(self, outline: dict[str, Any], think_tags: tuple[str, str]) -> str:
        """Render an assistant turn with the template, from the first sampled text up to the end-of-turn token."""
        key = self.thought_style.key
        return self._strip_end(probes.render_body(self._template, self._prompt, outline, think_tags, key))

    def render_calls(self, style: CallStyle | None, calls: Sequence[ToolCall], tags: tuple[str, str]) -> str:
        """Render a turn that consists only of tool calls, up to the end-of-turn token."""
        if style is None:
            raise ValueError("the chat template renders no tool calls")
        key = self.thought_style.key
        turn = probes.render_body(self._template, self._prompt, style.make_outline(calls), tags, key)
        return self._strip_end(probes.remove_thought(turn, tags, self.prompt_opens_thought(tags)))

    def _strip_end(self, body: str) -> str:
        return body[: body.rindex(self.end_text)] if self.end_text and self.end_text in body else body
