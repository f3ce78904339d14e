"""Choice of the model family, and so of the parser, that reads the tool calls of a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from TrainingFactory.models import probes
from TrainingFactory.models.assistant_turns import AssistantTurns
from TrainingFactory.models.families import FAMILIES, THINK_TAGS, Family
from TrainingFactory.models.forms import learn_reader
from TrainingFactory.models.probes import CallStyle
from TrainingFactory.models.templates import ChatTemplate
from TrainingFactory.types import ToolCall

PROBE_CALL = ToolCall("probe_tool", {"text": "a b"})


class FamilyDetector:
    def __init__(
        self, template: ChatTemplate, turns: AssistantTurns, control_texts: Mapping[str, int]
    ) -> None:
        self._template, self._turns = template, turns
        self._control_texts = control_texts

    def find_style_and_family(self, requested_family: Family | None) -> tuple[CallStyle | None, Family]:
        """Return the template's style of tool calls and the family that parses them. Prefer a style that the family can
        parse."""
        styles = probes.find_call_styles(self._template)
        for style in styles:
            family = (
                self._detect_family(style) if requested_family is None else self._add_tags(requested_family)
            )
            if family is not None and self.can_read_calls(family, style):
                return style, family
        return (styles[0] if styles else None), self._add_tags(requested_family or FAMILIES["generic"])

    def can_read_calls(self, family: Family, style: CallStyle | None) -> bool:
        """Return whether the family's parser reads the calls that this template writes."""
        try:
            text = self._turns.render_calls(style, [PROBE_CALL], family.think)
            content, calls = family.read_calls(text, ())
        except ValueError:
            return False
        return calls == [PROBE_CALL] and not content.strip()  # text left over would be tags of another syntax

    def explain_no_tools(self, family: Family, style: CallStyle | None) -> str:
        """Return an error text: why the family cannot read the tool calls of this template."""
        if style is None:
            return "the chat template of this model renders no tool calls"
        try:
            self._turns.render_calls(style, [PROBE_CALL], family.think)
        except ValueError as error:
            return str(error)
        return (
            "the chat template of this model writes tool calls in a syntax that family "
            f"{family.name!r} does not read"
        )

    def _add_tags(self, family: Family) -> Family:
        """Return the family with the template's thought tags, unless the family defines its own tags."""
        tags = self._turns.thought_style.tags
        return family if tags is None or family.think != THINK_TAGS else replace(family, think=tags)

    def _detect_family(self, style: CallStyle) -> Family | None:
        """Return the first registered family that parses the template's calls, else a family whose parser is learned
        from them."""
        for family in FAMILIES.values():
            if family.needs_token is None or family.needs_token in self._control_texts:
                candidate = self._add_tags(family)
                if self.can_read_calls(candidate, style):
                    return candidate
        return self._learn_family(style)

    def _learn_family(self, style: CallStyle) -> Family | None:
        """Return a family whose parser is learned from the template's rendering of calls; None if that fails."""
        family = self._add_tags(Family("template", lambda text, tools: (text, [])))
        try:
            reader = learn_reader(
                lambda calls: self._turns.render_calls(style, calls, family.think), self._template.marks
            )
        except ValueError:
            return None
        if reader is not None:
            family = replace(family, read_calls=reader)
        return family if self.can_read_calls(family, style) else None
