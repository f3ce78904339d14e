"""Conversion of conversations to tokens and of sampled turns to messages, for any Hugging Face chat template.

History is never decoded and re-encoded. `render` writes the first prompt; after that a turn keeps its sampled ids, and
`extend` appends the text that the template puts between this turn and the next one. That text is cut out of a
rendering of the template itself (`probes.py`), so no family is special-cased here; families differ in how completions
are parsed (`turn_parser.py`, `families.py`, `forms.py`). Untrusted text cannot produce a control token
(`encoding.py`). `write` only writes messages that `parse` reads back unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from TrainingFactory.common.openai_format import message_from_dict, spec_from_dict
from TrainingFactory.models import probes
from TrainingFactory.models.assistant_turns import AssistantTurns
from TrainingFactory.models.encoding import TextEncoder, cache_short_texts
from TrainingFactory.models.families import get_family
from TrainingFactory.models.family_detection import FamilyDetector
from TrainingFactory.models.forms import TaggedCallReader
from TrainingFactory.models.message_images import (
    BLANK_IMAGE,
    IMAGES_NOTE,
    ImageLocator,
    collect_images,
    decode_with_images,
    join_results,
    move_images_after_results,
    replace_images,
)
from TrainingFactory.models.outlines import Outlines, Texts
from TrainingFactory.models.renderings import RenderingEncoder, Segments
from TrainingFactory.models.round_trip import RoundTripError, describe_difference, is_same_turn
from TrainingFactory.models.templates import ChatTemplate
from TrainingFactory.models.turn_parser import TurnParser
from TrainingFactory.types import Message, PlacedImage, ToolCall, ToolSpec, Turn

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision

TOOLS_ADVICE = (
    "set model.chat_template to a corrected template, set model.family=generic to put the tool list into the system "
    "message instead, or add a family with TrainingFactory.models.register_family"
)


class TemplateChatFormat:
    """Chat format of a tokenizer's template. `family` None: use the first family whose parser reads the template's
    calls. `stop_ids` are additional tokens that end a turn. `day` is the date for templates that print it; None: today.
    `vision`: the `Vision` of a model that sees images; without it, tool results get a placeholder text for each
    image."""

    def __init__(
        self,
        tokenizer: Any,
        family: str | None = None,
        *,
        thinking: bool | None = None,
        stop_ids: Sequence[int] = (),
        day: date | None = None,
        vision: Vision | None = None,
    ) -> None:
        requested_family = get_family(family) if family else None
        self.tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        control_texts = self._encoder.control_texts
        self._ends_in_thought_cached = lru_cache(4096)(self._ends_in_thought)  # many prompts end equally
        template_options = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        self._template = ChatTemplate(tokenizer, template_options, day)
        self._marks = self._template.marks
        self._template.takes_parts = probes.reads_only_parts(self._template)
        self.sees_images = vision is not None
        self._locator = ImageLocator(vision, self._encoder)
        self._turns = AssistantTurns(self._template, control_texts)
        detector = FamilyDetector(self._template, self._turns, control_texts)
        self._call_style, self.family = detector.find_style_and_family(requested_family)
        style = self._call_style
        self._renders_one_call = style is not None and probes.renders_one_call(self._template, style)
        self._render_turn_cached = cache_short_texts(self._render_turn)
        self._renderings = RenderingEncoder(self._encoder, self._marks, self._locator)
        self._parser = TurnParser(self.family, control_texts)
        can_read_calls = detector.can_read_calls(self.family, self._call_style)
        self._renders_tools = can_read_calls and probes.renders_tools(self._template)
        renders_results = probes.shows_tool_results(self._template, self._call_style, self._turns.end_text)
        self._replies_as_user = self.family.replies_as_user and not (
            can_read_calls or (renders_results and not requested_family)
        )
        self._opens_thinking = self._turns.prompt_opens_thought(self.family.think)
        thought_key = self._turns.thought_style.key
        self._outlines = Outlines(self._template, self._call_style, self._encoder, thought_key)
        self._calls_end_id = control_texts.get(
            probes.find_calls_end(self._template, self._call_style, control_texts) or ""
        )
        self.stop_ids = self._find_stop_ids(tokenizer.eos_token_id, stop_ids)
        # The family writes calls for templates that render none, or that drop the text or thought beside a call.
        self._write_calls: Callable[[Sequence[ToolCall]], str] | None = None
        if not can_read_calls or self._describe_misread():
            self._write_calls = self.family.calls_text
        self._outlines.set_call_format(has_json_calls=self._write_calls is not None)
        self._no_tools_error = f"{detector.explain_no_tools(self.family, self._call_style)}; {TOOLS_ADVICE}"
        self._tools_error = (
            self._describe_misread() if requested_family or can_read_calls else self._no_tools_error
        )
        self.warning = self._check_example()
        # Images of tool results go into a user message after the results.
        self._moves_images = vision is not None and not self._replies_as_user
        self.note = None if vision is None else self._check_images()
        self._template.limits_steps = False

    # writing

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[ToolSpec | Mapping[str, Any]] = (),
    ) -> list[int]:
        conversation = [as_message(message) for message in messages]
        specs = [as_spec(tool) for tool in tools]
        if not conversation:
            raise ValueError("a conversation needs at least one message")
        if specs and self._tools_error:
            raise ValueError(self._tools_error)
        schemas, schemas_text, texts = (
            self._outlines.shield_schemas(specs) if self._renders_tools else ([], "", [])
        )
        conversation = self._adapt_messages(conversation)
        outlines = [self._outlines.outline(message, texts) for message in conversation]
        if specs and not self._renders_tools:
            self._put_tools_into_system(outlines, specs, texts)
        cache_key = json.dumps(outlines) + schemas_text
        segments = self._renderings.get_cached(cache_key)
        if segments is None:
            text = self._template.render(outlines, schemas)
            rendered_marks = self._marks.find_numbers(text)
            for outline in outlines:
                marks = self._marks.find_numbers(json.dumps(outline["content"]))
                if outline["role"] != "assistant" and not rendered_marks.issuperset(marks):
                    raise ValueError(
                        f"the chat template drops a {outline['role']} message of this conversation"
                    )
            segments = self._renderings.split_and_cache(cache_key, text)
        return self._renderings.fill_segments(segments, texts, collect_images(conversation))

    def extend(self, turn: Turn, replies: Sequence[Message | Mapping[str, Any]]) -> list[int]:
        sampled_ids = turn.completion.token_ids
        if not sampled_ids or sampled_ids[-1] not in self.stop_ids:
            raise ValueError("cannot extend a turn that was cut before its stop token")
        messages = self._adapt_messages([as_message(reply) for reply in replies])
        texts: Texts = ["", ""]  # marks 0 and 1 are in the part before the replies
        texts_after_images: Texts = []
        for message in messages:
            content, *later_contents = self._outlines.render_contents(message)
            texts += [content, message.name or "tool"]
            texts_after_images += later_contents
        ids = self._renderings.fill_segments(
            self._render_continuation(messages), texts + texts_after_images, collect_images(messages)
        )
        # if the template has no end-of-turn token, the stop token is the first token of the next message (GLM)
        return ids[1:] if self._turns.end_text is None and ids[:1] == sampled_ids[-1:] else ids

    def write(
        self,
        message: Message | Mapping[str, Any],
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
        exact: bool = True,
    ) -> list[int]:
        message = as_message(message)
        if message.images:
            raise ValueError("an assistant message cannot have images")
        if self._renders_one_call and self._write_calls is None and len(message.tool_calls) > 1:
            raise ValueError(
                f"the chat template renders one call per turn, but this message has {len(message.tool_calls)}"
            )
        opens_thought = self.opens_thought(prompt_ids)
        first_error: ValueError | None = None
        for compose in (self._render_with_template, self._compose_parts):
            texts: Texts = [""]  # mark 0 is the user's message
            try:
                body = compose(message, texts, opens_thought)
            except ValueError as error:
                first_error = first_error or error
                continue
            ids = self._renderings.fill_segments(self._renderings.split_turn(body), texts)
            end_text = self._turns.end_text
            end_id = self._encoder.control_texts[end_text] if end_text else self.stop_ids[0]
            if ids[-1:] not in ([end_id], [self._calls_end_id]):
                ids.append(end_id)
            if not exact:
                return ids
            parsed_message = self.parse(ids, prompt_ids, tools)
            if is_same_turn(parsed_message, message):
                return ids
            difference = describe_difference(self.family.name, message, parsed_message)
            first_error = first_error or RoundTripError(difference)
        assert first_error is not None
        raise first_error

    def _render_with_template(self, message: Message, texts: Texts, opens_thought: bool) -> str:
        """Render an assistant turn with the template, from the first sampled text to the end of the turn."""
        write_calls = self._write_calls if message.tool_calls else None
        outline = self._outlines.outline(replace(message, tool_calls=[]) if write_calls else message, texts)
        body = self._render_turn_cached(json.dumps(outline))
        if write_calls:
            body += write_calls([self._outlines.outline_call(call, texts) for call in message.tool_calls])
        if opens_thought == self._opens_thinking:
            return body
        if opens_thought:
            raise ValueError("the chat template opens a thought in this turn, but not in the first turn")
        # the header of the first turn opens a thought, the header of this turn does not
        think_start, think_end = self.family.think
        thought, _, answer = body.partition(think_end)
        if not message.reasoning:
            return answer.lstrip("\n")
        return f"{think_start}\n{thought.strip()}\n{think_end}{answer}"

    def _render_turn(self, outline: str) -> str:
        """Render a turn from its outline. The outline is JSON text, because it is the key of a cache."""
        return self._turns.render(json.loads(outline), self.family.think)

    def _compose_parts(self, message: Message, texts: Texts, opens_thought: bool) -> str:
        """Compose a turn from thought, text and calls, each rendered alone, for templates that cannot combine them."""
        think_start, think_end = self.family.think
        message_break = self.family.message_break
        turn_parts = [Message("assistant", message.content)] if message.content else []
        turn_parts += [Message("assistant", tool_calls=message.tool_calls)] if message.tool_calls else []
        opens_thinking = self._opens_thinking
        bodies = [self._render_with_template(part, texts, opens_thinking) for part in turn_parts]
        if len(bodies) > 1:
            bodies[0] = bodies[0].replace(*self.family.preamble, 1)
        text = (message_break or "\n").join(
            probes.remove_thought(body, self.family.think, opens_thinking).strip("\n") for body in bodies
        )
        if not (opens_thought or message.reasoning):
            return text
        thought = self._outlines.mark(message.reasoning.strip("\n"), texts) if message.reasoning else ""
        if message_break is not None:
            return f"{'' if opens_thought else think_start}{thought}{message_break}{text}"
        return f"{'' if opens_thought else think_start + chr(10)}{thought}\n{think_end}\n\n{text}"

    # reading

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        ids = list(token_ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        quotes: Texts = []
        text = self._encoder.decode_quoted(ids, lambda quote: self._outlines.mark(quote, quotes))
        message = self._parser.parse(text, self.opens_thought(prompt_ids), tools)
        return self._outlines.restore_quotes(message, quotes) if quotes else message

    def parse_text(self, text: str, tools: Sequence[ToolSpec] = ()) -> Message:
        """Parse an assistant's text as a message; tags in it count as control tokens."""
        return self._parser.parse(text, self._opens_thinking, tools)

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a turn after this prompt begins inside a thought. Empty prompt: the first turn of a chat."""
        if not prompt_ids:
            return self._opens_thinking
        return self._ends_in_thought_cached(tuple(prompt_ids[-16:]))

    def _ends_in_thought(self, last_ids: tuple[int, ...]) -> bool:
        return self.decode(last_ids).rstrip().endswith(self.family.think[0])

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode_with_images(self._encoder.decode, token_ids)

    def truncate(self, text: str, max_tokens: int) -> str:
        return self._encoder.truncate(text, max_tokens)

    def _render_continuation(self, replies: Sequence[Message]) -> Segments:
        """Render the text between an assistant turn and the next one, with these replies, as segments to encode."""
        cache_key = tuple([(reply.role, *probes.get_content_shape(reply)) for reply in replies])
        segments = self._renderings.get_cached(cache_key)
        if segments is not None:
            return segments
        text = probes.render_continuation(self._template, self._call_style, self._turns.end_text, replies)
        marks = self._marks.find_numbers(text)
        if any(reply.content and 2 + 2 * index not in marks for index, reply in enumerate(replies)):
            raise ValueError("the chat template drops a reply to an assistant turn")
        return self._renderings.split_and_cache(cache_key, text)

    # what the template does not render

    def _adapt_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Join the tool results of a turn into one user message, if the template does not render tool messages. If the
        template renders no images in tool messages, move their images into a user message after them."""
        if not self.sees_images:
            messages = [replace_images(message) if message.images else message for message in messages]
        if self._replies_as_user:
            return join_results(messages)
        return move_images_after_results(messages) if self._moves_images else list(messages)

    def _check_images(self) -> str | None:
        """Raise ValueError if the template renders no images. Return a note for the user if it renders no images of
        tool results."""
        images = [PlacedImage(0, BLANK_IMAGE)]
        user_message, tool_reply = (Message(role, "m", images=images) for role in ("user", "tool"))
        self._locator.require_image(lambda: self._template.render([self._outlines.outline(user_message, [])]))
        if self._replies_as_user:
            return None
        with suppress(ValueError):
            text = probes.render_continuation(
                self._template, self._call_style, self._turns.end_text, [tool_reply]
            )
            self._moves_images = self._locator.count_images(text) != 1
        return IMAGES_NOTE if self._moves_images else None

    def _put_tools_into_system(
        self, outlines: list[dict[str, Any]], specs: list[ToolSpec], texts: Texts
    ) -> None:
        describe_tools, tools_text = self.family.describe_tools, self.family.tools_text
        if describe_tools is None or tools_text is None:
            raise ValueError(self._no_tools_error)
        if outlines[0]["role"] != "system":
            outlines.insert(0, {"role": "system", "content": ""})
        separator = "\n\n" if outlines[0]["content"] else ""
        tool_list = self._outlines.mark(describe_tools(specs), texts)
        outlines[0]["content"] += separator + tools_text.replace("{tools}", tool_list)

    # probes

    def _describe_misread(self) -> str:
        """Return an error text for the first canary turn that does not parse back as written; "" if all do."""
        tags = f"{self.family.think[1]} </tool_call> "
        call = ToolCall("probe_tool", {"text": f'{tags}"quoted"\n\\ é', "n": 5, "deep": {"x": ["y", True]}})
        probe_spec = ToolSpec(
            "probe_tool", "", {"type": "object", "properties": {"text": {"type": "string"}}}
        )
        for calls in ([call], [call, ToolCall("probe_tool", {})]):
            for content, reasoning in (("", None), ("Some text.", None), ("Some text.", "A thought.")):
                try:
                    self.write(Message("assistant", content, calls, reasoning=reasoning), tools=[probe_spec])
                except RoundTripError as error:
                    return f"{error}; {TOOLS_ADVICE}"
                except ValueError as error:  # some templates accept only one call per turn
                    if len(calls) == 1:
                        return f"{error}; {TOOLS_ADVICE}"
        return ""

    def _check_example(self) -> str | None:
        """Return a warning if the template instructs the model with an example call that the parser rejects."""
        read_calls = self.family.read_calls
        begin, close = ("<tool_call>", "</tool_call>")
        if isinstance(read_calls, TaggedCallReader):
            begin, close = read_calls.begin.strip(), read_calls.close.strip()
        example = probes.find_example(self._template, begin, close) if self._renders_tools and close else None
        calls = read_calls(example, ())[1] if example else []
        if not example or (calls and not any(call.error for call in calls)):
            return None
        return (
            f"the chat template shows an example call that its parser (family {self.family.name!r}) rejects, and the "
            f"model may copy it: {example!r}. Set model.chat_template to a template with a corrected example"
        )

    def _find_stop_ids(self, eos_id: int | None, extra_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the stop tokens of a turn, the template's own first."""
        control_texts = self._encoder.control_texts
        end_text = self._turns.end_text
        family_stop_ids = [control_texts.get(text) for text in self.family.stop_texts]
        template_stop_ids = [control_texts[end_text]] if end_text else self._find_reply_starts()
        candidate_ids = (*template_stop_ids, eos_id, self._calls_end_id, *family_stop_ids, *extra_ids)
        return tuple(dict.fromkeys(stop_id for stop_id in candidate_ids if stop_id is not None))

    def _find_reply_starts(self) -> list[int]:
        """Return the control tokens that begin the message after a turn. They serve as stop tokens if the template has
        no end-of-turn token."""
        start_ids: list[int] = []
        for reply in (Message("tool", "r"), Message("user", "r")):
            try:
                first_segment = self._render_continuation([reply])[0]
            except ValueError:
                continue
            if isinstance(first_segment, tuple) and first_segment[0] in self._encoder.control_ids:
                start_ids.append(first_segment[0])
        return start_ids


chat_format = TemplateChatFormat


def as_message(message: Message | Mapping[str, Any]) -> Message:
    """Convert an OpenAI-style dict to a message; a `Message` is returned unchanged."""
    return message if isinstance(message, Message) else message_from_dict(message)


def as_spec(tool: ToolSpec | Mapping[str, Any]) -> ToolSpec:
    return tool if isinstance(tool, ToolSpec) else spec_from_dict(tool)
