"""Probes of a chat template with marks: which form of tool calls it accepts, whether it renders tools, how it ends a
turn, and what it writes between one assistant turn and the next."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from itertools import count as count_from
from typing import Any

from TrainingFactory.common.images import split_text
from TrainingFactory.models.templates import ChatTemplate, make_text_parts
from TrainingFactory.types import Message, ToolCall

CALL_ID_PREFIX = "call0000"  # plus one digit: some templates require ids of nine characters
IMAGE_PART = {"type": "image"}
TAG_PATTERN = r"(?:<[^<>\s]+>|\[/?[A-Z_]+\])"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of a message's thought, by template
GEMMA_THOUGHT = ("<|channel>thought", "<channel|>")  # some versions of Gemma's template drop thoughts


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form of assistant messages with tool calls that a template accepts."""

    has_text_arguments: bool  # JSON text instead of an object
    empty_content: str | None  # the value of `content` if there is none

    def make_outline(self, calls: Sequence[ToolCall], content: str = "") -> dict[str, Any]:
        tool_calls = []
        for index, call in enumerate(calls):
            has_text = self.has_text_arguments
            arguments = json.dumps(call.arguments, ensure_ascii=False) if has_text else call.arguments
            function = {"name": call.name, "arguments": arguments}
            tool_calls.append({"id": f"{CALL_ID_PREFIX}{index}", "type": "function", "function": function})
        return {"role": "assistant", "content": content or self.empty_content, "tool_calls": tool_calls}


def make_user_turn(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def split_content(message: Message) -> list[str | None]:
    """Return the parts of a message's content in order: its texts, and None for each image."""
    return [part if isinstance(part, str) else None for part in split_text(message.content, message.images)]


def get_content_shape(message: Message) -> tuple[bool, ...]:
    """Return for each part of a message whether it is an image. Messages of equal shape have the same rendering around
    their texts."""
    if not message.images:
        return (False,) if message.content else ()
    return tuple(part is None for part in split_content(message))


def reads_only_parts(template: ChatTemplate) -> bool:
    """Return whether the template renders content only as a list of parts, not as a text (SmolVLM)."""
    mark = template.marks[0]
    try:
        if mark in template.render([make_user_turn(mark)]):
            return False
    except ValueError:
        pass
    try:
        return mark in template.render([make_user_turn(make_text_parts(mark))])
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ThoughtStyle:
    """The key of a message under which a template expects the thought, and the tags around it, if they are known."""

    key: str = THOUGHT_KEYS[0]
    tags: tuple[str, str] | None = None


def find_thought_style(template: ChatTemplate, prompt: str, control_texts: Iterable[str]) -> ThoughtStyle:
    """Find how the template writes a thought. `prompt` is its prompt for a user message."""
    content, thought = template.marks[1], template.marks[2]
    key = None
    for candidate_key in THOUGHT_KEYS:
        turn = {"role": "assistant", "content": content, candidate_key: thought}
        try:
            text_before, has_thought, text_after = template.render(
                [make_user_turn(template.marks[0]), turn], header=False
            ).partition(thought)
        except ValueError:
            continue
        if not has_thought:
            continue
        key = key or candidate_key
        opening_match = re.search(rf"{TAG_PATTERN}\w*(?=\s*\Z)", text_before)
        closing_match = re.match(rf"\s*({TAG_PATTERN})", text_after)
        if opening_match and closing_match and content in text_after:
            tags = opening_match[0], closing_match[1]
            text_before_tags = prompt.rstrip().removesuffix(tags[1]).rstrip().removesuffix(tags[0])
            if tags[0] not in text_before_tags:  # else it is the tag of any message
                return ThoughtStyle(candidate_key, tags)
    return ThoughtStyle(key or THOUGHT_KEYS[0], _find_header_tags(template, prompt, control_texts))


def _find_header_tags(
    template: ChatTemplate, prompt: str, control_texts: Iterable[str]
) -> tuple[str, str] | None:
    """Return the tags of an empty thought at the end of the generation prompt that finished turns do not show.
    Otherwise return Gemma's tags, if the tokenizer has them."""
    header_match = re.search(rf"({TAG_PATTERN}\w*)\s*({TAG_PATTERN})\s*\Z", prompt)
    if header_match:
        turn = {"role": "assistant", "content": template.marks[1]}
        conversation = template.render([make_user_turn(template.marks[0]), turn], header=False)
        if conversation.startswith(prompt[: header_match.start()]) and header_match[1] not in conversation:
            return header_match[1], header_match[2]
    is_gemma = {"<|channel>", "<channel|>"} <= set(control_texts)
    return GEMMA_THOUGHT if is_gemma else None


def find_call_styles(template: ChatTemplate) -> list[CallStyle]:
    """Return the styles in which the template renders a call's name and argument, one for each distinct rendering."""
    name, argument = template.marks[1], template.marks[2]
    styles = dict[str, CallStyle]()
    for style in (CallStyle(has_text, empty) for has_text in (False, True) for empty in (None, "")):
        try:
            turn = style.make_outline([ToolCall(name, {"a": argument})])
            text = template.render([make_user_turn("m"), turn], header=False)
        except ValueError:
            continue
        if name in text and argument in text and "None" not in text:
            styles.setdefault(text, style)
    return list(styles.values())


def renders_one_call(template: ChatTemplate, style: CallStyle) -> bool:
    """Return whether the template drops every call of a turn but one (gpt-oss)."""
    names = template.marks[1], template.marks[2]
    try:
        turn = style.make_outline([ToolCall(name, {}) for name in names])
        text = template.render([make_user_turn("m"), turn], header=False)
    except ValueError:
        return False  # it has its own error for a second call
    return not all(name in text for name in names)


def make_tool_schema(name: str, description: str, argument_type: str = "string") -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": argument_type, "description": "d"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def renders_tools(template: ChatTemplate) -> bool:
    name = template.marks[1]
    try:
        return name in template.render([make_user_turn("m")], [make_tool_schema(name, "d")])
    except ValueError:
        return False


def find_example(template: ChatTemplate, begin: str, close: str) -> str | None:
    """Return the example call between these tags in the template's instructions, with values in place of placeholders
    such as <function-name>; None if there is none. A mention of both tags in a sentence is no example."""
    try:
        text = template.render([make_user_turn("m")], [make_tool_schema("f", "d")])
    except ValueError:
        return None
    begin, close = re.escape(begin), re.escape(close)
    example_match = re.search(
        f"{begin}(?:(?!{begin}|{close}).)*[{{<(=](?:(?!{begin}|{close}).)*{close}", text, re.DOTALL
    )
    if example_match is None or "..." in example_match[0] or not begin.startswith(("<", "\\[")):
        return None
    if '"name"' not in example_match[0]:
        return example_match[0]
    example = re.sub(r"(?<=[:\s])<[\w -]*(?:arg|json|object|dict)[\w -]*>", "{}", example_match[0])
    return re.sub(r"(?<=[:\s])<[\w -]+>", '"f"', example)


def find_turn_end(template: ChatTemplate, control_texts: Iterable[str]) -> str | None:
    """Return the control token with which the template ends an assistant message; None if there is none."""
    placeholder = template.marks[1]
    text = template.render([make_user_turn("m"), {"role": "assistant", "content": placeholder}], header=False)
    if placeholder not in text:
        raise ValueError("the chat template drops assistant messages without tool calls")
    end_part = text.rpartition(placeholder)[2]
    end_candidates = [
        (end_part.index(control), -len(control), control) for control in control_texts if control in end_part
    ]
    return min(end_candidates)[2] if end_candidates else None


def find_calls_end(
    template: ChatTemplate, style: CallStyle | None, control_texts: Iterable[str]
) -> str | None:
    """Return the control token that ends a turn with tool calls; None if that token also occurs inside the turn, as
    Gemma 4's does."""
    try:
        turns = [style.make_outline([ToolCall("f", {"a": "b"})] * count) if style else {} for count in (1, 2)]
        user_turn = make_user_turn("m")
        one_call, two_calls = (template.render([user_turn, turn], header=False).rstrip() for turn in turns)
    except ValueError:
        return None
    shared_texts = [text for text in control_texts if one_call.endswith(text) and two_calls.endswith(text)]
    return next((text for text in shared_texts if one_call.count(text) == two_calls.count(text)), None)


def remove_thought(body: str, think_tags: tuple[str, str], is_thinking_open: bool) -> str:
    """Return a turn without its leading thought."""
    has_thought = is_thinking_open or body.lstrip().startswith(think_tags[0])
    return body.partition(think_tags[1])[2] if has_thought and think_tags[1] in body else body


def shows_tool_results(template: ChatTemplate, style: CallStyle | None, end_text: str | None) -> bool:
    try:
        return template.marks[2] in render_continuation(template, style, end_text, [Message("tool", "r")])
    except ValueError:
        return False


def render_body(
    template: ChatTemplate,
    prompt: str,
    outline: dict[str, Any],
    think_tags: tuple[str, str],
    key: str = THOUGHT_KEYS[0],
) -> str:
    """Render a conversation and return its assistant turn, from the model's first token. `prompt` is the template's
    prompt for a user message that is mark 0."""
    conversation = template.render([make_user_turn(template.marks[0]), outline], header=False)
    if conversation.startswith(prompt):
        return conversation[len(prompt) :]
    # The header opens a thought that the finished turn no longer shows.
    text_before, opens_thought, _ = prompt.rpartition(think_tags[0])
    if not opens_thought or not conversation.startswith(text_before):
        raise ValueError(_describe_beginnings(template, prompt, conversation))
    body = conversation[len(text_before) :]
    if prompt.rstrip().endswith(think_tags[1]):
        return body
    if body.startswith(think_tags[0]):  # an empty thought, without the white space after the header's tag
        return body.removeprefix(think_tags[0])
    thought = outline.get(key, "")
    return thought + body if body.startswith(think_tags[1]) else f"{thought}\n{think_tags[1]}\n\n{body}"


def _describe_beginnings(template: ChatTemplate, prompt: str, conversation: str) -> str:
    mark = template.marks[0]
    headers = [
        text.rpartition(mark)[2].partition(template.marks[1][:-3])[0][:60] for text in (prompt, conversation)
    ]
    return (
        f"the chat template begins an assistant turn differently from its generation prompt: {headers[1]!r} instead of "
        f"{headers[0]!r}"
    )


def make_renderer(template: ChatTemplate, context: str, style: CallStyle | None) -> Callable[[str], str]:
    """Return a function that renders the shortest conversation with its text at `context`: a role or part of a tool."""

    def render(text: str) -> str:
        tools: list[dict[str, Any]] = []
        calls = {"argument": ToolCall("f", {"a": text}), "nested argument": ToolCall("f", {"a": [text]})}
        call = calls.get(context)
        turn = {"role": "assistant", "content": "m"}
        if style:
            turn = style.make_outline([call or ToolCall("f", {"a": "b"})])
        conversation = [make_user_turn("m")]
        if context == "system":
            conversation = [{"role": "system", "content": text}, make_user_turn("m")]
        elif context in ("user", "user part"):
            conversation = [
                make_user_turn(text if context == "user" else [IMAGE_PART, *make_text_parts(text)])
            ]
        elif context == "assistant":
            conversation = [make_user_turn("m"), {"role": "assistant", "content": text}]
        elif context in ("tool", "tool part"):
            content = text if context == "tool" else [IMAGE_PART, *make_text_parts(text)]
            reply = {"role": "tool", "tool_call_id": f"{CALL_ID_PREFIX}0", "name": "f", "content": content}
            conversation = [make_user_turn("m"), turn, reply]
        elif call:
            conversation = [make_user_turn("m"), turn]
        else:
            tool_fields = {"tool name": (text, "d"), "tool type": ("f", "d", text)}
            tools = [make_tool_schema(*tool_fields.get(context, ("f", text)))]
        return template.render(conversation, tools, header=False)

    return render


def outline_reply(template: ChatTemplate, reply: Message, index: int, mark_numbers: Iterator[int]) -> Any:
    """Return the content of reply `index` with marks in place of its texts: mark 2 + 2 * index for the first text,
    then the marks numbered by `mark_numbers` for the texts after an image."""
    if not reply.images:
        return template.marks[2 + 2 * index] if reply.content else ""
    marks = chain([2 + 2 * index], mark_numbers)
    parts = split_content(reply)
    return [IMAGE_PART if part is None else make_text_parts(template.marks[next(marks)])[0] for part in parts]


def render_continuation(
    template: ChatTemplate, style: CallStyle | None, end_text: str | None, replies: Sequence[Message]
) -> str:
    """Return the template's text after a sampled turn: the rest of the turn's end marker, the replies, and the next
    generation prompt."""
    placeholders = template.marks
    tool_indices = [index for index, reply in enumerate(replies) if reply.role == "tool"]
    last_error: ValueError | None = None
    # Some templates accept only one call per turn, but any number of results.
    for num_calls in dict.fromkeys((len(tool_indices), min(1, len(tool_indices)))):
        calls = [
            ToolCall(placeholders[3 + 2 * index], {"a": placeholders[1]})
            for index in tool_indices[:num_calls]
        ]
        turn = (
            style.make_outline(calls)
            if style and calls
            else {"role": "assistant", "content": placeholders[1]}
        )
        reply_messages: list[dict[str, Any]] = []
        mark_numbers = count_from(2 + 2 * len(replies))
        # mark 2 + 2i is the text of reply i, mark 3 + 2i the name of its tool
        for index, reply in enumerate(replies):
            content = outline_reply(template, reply, index, mark_numbers)
            reply_message = {"role": reply.role, "content": content}
            if reply.role == "tool":
                call_id = f"{CALL_ID_PREFIX}{min(len(reply_messages), max(num_calls - 1, 0))}"
                reply_message |= {"tool_call_id": call_id, "name": placeholders[3 + 2 * index]}
            reply_messages.append(reply_message)
        try:
            finished_turn = template.render([make_user_turn(placeholders[0]), turn], header=False)
            conversation = template.render([make_user_turn(placeholders[0]), turn, *reply_messages])
        except ValueError as error:
            last_error = error
            continue
        return _cut_reply(finished_turn, conversation, (placeholders[0], placeholders[1]), end_text)
    assert last_error is not None
    raise last_error


def _cut_reply(finished_turn: str, conversation: str, marks: tuple[str, str], end_text: str | None) -> str:
    """Return the part of `conversation` that follows the last turn of `finished_turn`. `marks` are the marks of the
    user's message and of the end of that turn."""
    user_mark, turn_mark = marks
    turn_ending, after_turn = finished_turn.rpartition(turn_mark)[2], conversation.rpartition(turn_mark)[2]
    if turn_mark not in conversation:
        raise ValueError("the chat template drops an assistant turn that has a reply")
    turn_end = len(turn_ending)
    if end_text and end_text in turn_ending:
        turn_end = turn_ending.rindex(end_text) + len(end_text)
    if not after_turn.startswith(turn_ending[:turn_end]):
        other_end = re.match(TAG_PATTERN, after_turn)
        # gpt-oss ends the last turn with another token than the messages before it
        if (
            other_end
            and turn_ending[:turn_end] == end_text
            and finished_turn.partition(user_mark)[2].startswith(other_end[0])
        ):
            return after_turn[other_end.end() :]
        raise ValueError("the chat template ends an assistant turn differently if it has a reply")
    return after_turn[turn_end:]
