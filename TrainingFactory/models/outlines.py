"""Outlines: messages and tool lists as a chat template gets them, with a mark in place of every untrusted text."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from copy import deepcopy
from typing import Any

from TrainingFactory.common.openai_format import spec_to_dict
from TrainingFactory.models import probes
from TrainingFactory.models.encoding import TextEncoder
from TrainingFactory.models.probes import IMAGE_PART, CallStyle, split_content
from TrainingFactory.models.templates import ChatTemplate, Transform, escape_json
from TrainingFactory.types import Message, ToolCall, ToolSpec

Texts = list[str]  # mark number i stands for text number i
# Keywords of JSON schemas that templates look for; every other string of a tool list is untrusted.
SCHEMA_WORDS = frozenset(
    "type function name description parameters properties required items enum default anyOf return "
    "object string integer number boolean array null".split()
)

SIMPLE_TEXT = re.compile(r"[\w\n -&(-~]*")  # characters whose changes by a template show in the canaries


class Outlines:
    def __init__(
        self, template: ChatTemplate, style: CallStyle | None, encoder: TextEncoder, thought_key: str
    ) -> None:
        self._template, self._style, self._encoder = template, style, encoder
        self._thought_key = thought_key
        self._calls_as_json = self._marks_arguments = False
        self._transforms: dict[str, Transform] = {}
        self._last_specs: list[ToolSpec] = []
        self._last_schemas: tuple[list[dict[str, Any]], str, Texts] = ([], "", [])

    def set_call_format(self, has_json_calls: bool) -> None:
        """Set whether tool calls are written as JSON instead of by the template. If it is known how the template
        transforms a call's arguments, marks then replace ordinary strings in arguments too, so that calls that differ
        only in strings share one cached outline."""
        self._calls_as_json = has_json_calls
        with suppress(ValueError):
            self._marks_arguments = not has_json_calls and self.transform_text("argument", "") == ""

    def mark(self, text: str, texts: Texts) -> str:
        texts.append(text)
        return self._template.marks[len(texts) - 1]

    def transform_text(self, context: str, text: str) -> str:
        """Return the text as the template writes it in `context`. Some templates strip it or encode it as JSON."""
        if self._calls_as_json and context.endswith("argument"):
            return escape_json(text)
        if context not in self._transforms:
            render = probes.make_renderer(self._template, context, self._style)
            self._transforms[context] = self._template.find_transform(context, render)
        return self._transforms[context](text)

    def shield(self, value: Any, texts: Texts, context: str, key: str = "nested argument") -> Any:
        """Return a copy of JSON data with marks for all strings that could produce a control token. `context` names the
        place of the data's strings in the conversation, `key` the place of its object keys."""
        child_place = "nested argument" if context == "argument" else context
        if isinstance(value, dict):
            contexts = {"name": key} | ({"type": "tool type"} if context.startswith("tool ") else {})
            return {
                self.shield(name, texts, key): self.shield(child, texts, contexts.get(name, child_place), key)
                for name, child in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.shield(child, texts, child_place, key) for child in value]
        if (
            isinstance(value, str)
            and value not in SCHEMA_WORDS
            and self._encoder.may_form_control_token(value)
        ):
            return self.mark(self.transform_text(context, value), texts)
        return value

    def shield_schemas(self, specs: list[ToolSpec]) -> tuple[list[dict[str, Any]], str, Texts]:
        """Return the tool list as the template gets it, the list's JSON text, and the texts that its marks stand for.
        The result for the last list is cached, because the episodes of a batch have the same tools."""
        if specs != self._last_specs:
            texts: Texts = []
            schemas = self.shield([spec_to_dict(spec) for spec in specs], texts, "tool text", "tool name")
            self._last_specs, self._last_schemas = deepcopy(specs), (schemas, json.dumps(schemas), texts)
        schemas, text, texts = self._last_schemas
        return schemas, text, list(texts)

    def outline_call(self, call: ToolCall, texts: Texts) -> ToolCall:
        arguments = {
            self.shield(key, texts, "nested argument"): self._shield_argument(value, texts)
            for key, value in call.arguments.items()
        }
        return ToolCall(self.shield(call.name, texts, "argument"), arguments)

    def _shield_argument(self, value: Any, texts: Texts) -> Any:
        if (
            self._marks_arguments
            and isinstance(value, str)
            and value.strip()
            and SIMPLE_TEXT.fullmatch(value)
        ):
            return self.mark(self.transform_text("argument", value), texts)
        return self.shield(value, texts, "argument")

    def render_contents(self, message: Message) -> Texts:
        """Render the texts around a message's images. Return at least one text."""
        if not message.images:
            return [self.transform_text(message.role, message.content) if message.content else ""]
        parts = [part for part in split_content(message) if part is not None]
        return [self.transform_text(f"{message.role} part", part) for part in parts] or [""]

    def outline_content(self, message: Message, texts: Texts) -> Any:
        """Return a message's content with marks in place of its texts and placeholders in place of its images."""
        if not message.images:
            text = self.transform_text(message.role, message.content) if message.content else ""
            return self.mark(text, texts) if message.content else ""
        return [
            IMAGE_PART
            if part is None
            else {"type": "text", "text": self.mark(self.transform_text(f"{message.role} part", part), texts)}
            for part in split_content(message)
        ]

    def outline(self, message: Message, texts: Texts) -> dict[str, Any]:
        """Return the message as templates expect it, with marks in place of its texts."""
        content = self.outline_content(message, texts)
        outline: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            if self._style is None:
                raise ValueError("the chat template renders no tool calls, so this message cannot be written")
            calls = [self.outline_call(call, texts) for call in message.tool_calls]
            outline = self._style.make_outline(calls, content)
        if message.reasoning:
            outline[self._thought_key] = self.mark(message.reasoning.strip("\n"), texts)
        if message.role == "tool":
            outline["tool_call_id"] = f"{probes.CALL_ID_PREFIX}0"
            outline["name"] = self.mark(message.name or "tool", texts)
        return outline

    def restore_quotes(self, message: Message, quotes: Texts) -> Message:
        """Return an assistant message with the quoted texts in place of their marks."""

        def restore(value: Any) -> Any:
            if isinstance(value, str):
                parts = self._template.marks.split_at_marks(value)
                return "".join(quotes[part] if isinstance(part, int) else part for part in parts)
            if isinstance(value, dict):
                return {restore(key): restore(child) for key, child in value.items()}
            return [restore(child) for child in value] if isinstance(value, list) else value

        calls = [
            ToolCall(restore(call.name), restore(call.arguments), call.id, restore(call.error))
            for call in message.tool_calls
        ]
        return Message("assistant", restore(message.content), calls, reasoning=restore(message.reasoning))
