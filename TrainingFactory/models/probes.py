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
from TrainingFactory.models.templates import ChatTemplate, text_parts
from TrainingFactory.types import Message, ToolCall

CALL_ID = "call0000"  # plus one digit: some templates require ids of nine characters
IMAGE_PART = {"type": "image"}
TAG = r"(?:<[^<>\s]+>|\[/?[A-Z_]+\])"
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of a message's thought, by template
GEMMA_THOUGHT = ("<|channel>thought", "<channel|>")  # some versions of Gemma's template drop thoughts


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form of assistant messages with tool calls that a template accepts."""

    arguments_as_text: bool  # JSON text instead of an object
    empty_content: str | None  # the value of `content` if there is none

    def message(self, calls: Sequence[ToolCall], content: str = "") -> dict[str, Any]:
        rows = []
        for number, call in enumerate(calls):
            as_text = self.arguments_as_text
            arguments = json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments
            function = {"name": call.name, "arguments": arguments}
            rows.append({"id": f"{CALL_ID}{number}", "type": "function", "function": function})
        return {"role": "assistant", "content": content or self.empty_content, "tool_calls": rows}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def content_parts(message: Message) -> list[str | None]:
    """Return the parts of a message's content in order: its texts, and None for each image."""
    return [part if isinstance(part, str) else None for part in split_text(message.content, message.images)]


def content_shape(message: Message) -> tuple[bool, ...]:
    """Return for each part of a message whether it is an image. Messages of equal shape have the same rendering around
    their texts."""
    if not message.images:
        return (False,) if message.content else ()
    return tuple(part is None for part in content_parts(message))


def reads_only_parts(template: ChatTemplate) -> bool:
    """Return whether the template drops content that is a text and renders a list of parts (SmolVLM)."""
    mark = template.marks[0]
    try:
        if mark in template.text([user(mark)]):
            return False
    except ValueError:
        pass
    try:
        return mark in template.text([user(text_parts(mark))])
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ThoughtStyle:
    """The key of a message under which a template expects the thought, and the tags around it, if they are known."""

    key: str = THOUGHT_KEYS[0]
    tags: tuple[str, str] | None = None


def find_thought_style(template: ChatTemplate, start: str, control_texts: Iterable[str]) -> ThoughtStyle:
    """Find how the template writes a thought. `start` is its prompt for a user message."""
    content, thought = template.marks[1], template.marks[2]
    key = None
    for candidate in THOUGHT_KEYS:
        turn = {"role": "assistant", "content": content, candidate: thought}
        try:
            before, found, rest = template.text([user(template.marks[0]), turn], header=False).partition(
                thought
            )
        except ValueError:
            continue
        if not found:
            continue
        key = key or candidate
        opening, closing = re.search(rf"{TAG}\w*(?=\s*\Z)", before), re.match(rf"\s*({TAG})", rest)
        if opening and closing and content in rest:
            tags = opening[0], closing[1]
            earlier = start.rstrip().removesuffix(tags[1]).rstrip().removesuffix(tags[0])
            if tags[0] not in earlier:  # else it is the tag of any message
                return ThoughtStyle(candidate, tags)
    return ThoughtStyle(key or THOUGHT_KEYS[0], _tags_of_header(template, start, control_texts))


def _tags_of_header(
    template: ChatTemplate, start: str, control_texts: Iterable[str]
) -> tuple[str, str] | None:
    """Return the tags of an empty thought at the end of the generation prompt that finished turns do not show.
    Otherwise return Gemma's tags, if the tokenizer has them."""
    header = re.search(rf"({TAG}\w*)\s*({TAG})\s*\Z", start)
    if header:
        turn = {"role": "assistant", "content": template.marks[1]}
        conversation = template.text([user(template.marks[0]), turn], header=False)
        if conversation.startswith(start[: header.start()]) and header[1] not in conversation:
            return header[1], header[2]
    is_gemma = {"<|channel>", "<channel|>"} <= set(control_texts)
    return GEMMA_THOUGHT if is_gemma else None


def find_call_styles(template: ChatTemplate) -> list[CallStyle]:
    """Return the styles in which the template renders a call's name and argument, one for each rendering."""
    name, argument = template.marks[1], template.marks[2]
    styles = dict[str, CallStyle]()
    for style in (CallStyle(as_text, empty) for as_text in (False, True) for empty in (None, "")):
        try:
            text = template.text([user("m"), style.message([ToolCall(name, {"a": argument})])], header=False)
        except ValueError:
            continue
        if name in text and argument in text and "None" not in text:
            styles.setdefault(text, style)
    return list(styles.values())


def renders_one_call(template: ChatTemplate, style: CallStyle) -> bool:
    """Return whether the template drops every call of a turn but one (gpt-oss)."""
    names = template.marks[1], template.marks[2]
    try:
        text = template.text([user("m"), style.message([ToolCall(name, {}) for name in names])], header=False)
    except ValueError:
        return False  # it has its own error for a second call
    return not all(name in text for name in names)


def tool(name: str, description: str, argument_type: str = "string") -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": argument_type, "description": "d"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def renders_tools(template: ChatTemplate) -> bool:
    name = template.marks[1]
    try:
        return name in template.text([user("m")], [tool(name, "d")])
    except ValueError:
        return False


def find_example(template: ChatTemplate, begin: str, close: str) -> str | None:
    """Return the example call between these tags in the template's instructions, with values in place of placeholders
    such as <function-name>; None if there is none. A mention of both tags in a sentence is no example."""
    try:
        text = template.text([user("m")], [tool("f", "d")])
    except ValueError:
        return None
    begin, close = re.escape(begin), re.escape(close)
    example = re.search(
        f"{begin}(?:(?!{begin}|{close}).)*[{{<(=](?:(?!{begin}|{close}).)*{close}", text, re.DOTALL
    )
    if example is None or "..." in example[0] or not begin.startswith(("<", "\\[")):
        return None
    if '"name"' not in example[0]:
        return example[0]
    with_objects = re.sub(r"(?<=[:\s])<[\w -]*(?:arg|json|object|dict)[\w -]*>", "{}", example[0])
    return re.sub(r"(?<=[:\s])<[\w -]+>", '"f"', with_objects)


def end_of_turn(template: ChatTemplate, control_texts: Iterable[str]) -> str | None:
    """Return the control token with which the template ends an assistant message; None if there is none."""
    placeholder = template.marks[1]
    text = template.text([user("m"), {"role": "assistant", "content": placeholder}], header=False)
    if placeholder not in text:
        raise ValueError("the chat template drops assistant messages without tool calls")
    rest = text.rpartition(placeholder)[2]
    candidates = [
        (rest.index(control), -len(control), control) for control in control_texts if control in rest
    ]
    return min(candidates)[2] if candidates else None


def end_of_calls(template: ChatTemplate, style: CallStyle | None, control_texts: Iterable[str]) -> str | None:
    """Return the control token that ends a turn with tool calls; None if that token also occurs inside the turn, as
    Gemma 4's does."""
    try:
        turns = [style.message([ToolCall("f", {"a": "b"})] * count) if style else {} for count in (1, 2)]
        one_call, two_calls = (template.text([user("m"), turn], header=False).rstrip() for turn in turns)
    except ValueError:
        return None
    shared_ends = [text for text in control_texts if one_call.endswith(text) and two_calls.endswith(text)]
    return next((text for text in shared_ends if one_call.count(text) == two_calls.count(text)), None)


def after_thought(body: str, think: tuple[str, str], is_thinking_open: bool) -> str:
    """Return a turn without its leading thought."""
    has_thought = is_thinking_open or body.lstrip().startswith(think[0])
    return body.partition(think[1])[2] if has_thought and think[1] in body else body


def shows_tool_results(template: ChatTemplate, style: CallStyle | None, end_text: str | None) -> bool:
    try:
        return template.marks[2] in continuation(template, style, end_text, [Message("tool", "r")])
    except ValueError:
        return False


def assistant_body(
    template: ChatTemplate,
    start: str,
    outline: dict[str, Any],
    think: tuple[str, str],
    key: str = THOUGHT_KEYS[0],
) -> str:
    """Return the assistant's part of a rendering, from the model's first token. `start` is the template's prompt for a
    user message that is mark 0."""
    conversation = template.text([user(template.marks[0]), outline], header=False)
    if conversation.startswith(start):
        return conversation[len(start) :]
    # The header opens a thought that the finished turn no longer shows.
    before, opens_thought, _ = start.rpartition(think[0])
    if not opens_thought or not conversation.startswith(before):
        raise ValueError(_different_beginning(template, start, conversation))
    rest = conversation[len(before) :]
    if start.rstrip().endswith(think[1]):
        return rest
    if rest.startswith(think[0]):  # an empty thought, without the white space after the header's tag
        return rest.removeprefix(think[0])
    thought = outline.get(key, "")
    return thought + rest if rest.startswith(think[1]) else f"{thought}\n{think[1]}\n\n{rest}"


def _different_beginning(template: ChatTemplate, start: str, conversation: str) -> str:
    mark = template.marks[0]
    headers = [
        text.rpartition(mark)[2].partition(template.marks[1][:-3])[0][:60] for text in (start, conversation)
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
            turn = style.message([call or ToolCall("f", {"a": "b"})])
        conversation = [user("m")]
        if context == "system":
            conversation = [{"role": "system", "content": text}, user("m")]
        elif context in ("user", "user part"):
            conversation = [user(text if context == "user" else [IMAGE_PART, *text_parts(text)])]
        elif context == "assistant":
            conversation = [user("m"), {"role": "assistant", "content": text}]
        elif context in ("tool", "tool part"):
            content = text if context == "tool" else [IMAGE_PART, *text_parts(text)]
            reply = {"role": "tool", "tool_call_id": f"{CALL_ID}0", "name": "f", "content": content}
            conversation = [user("m"), turn, reply]
        elif call:
            conversation = [user("m"), turn]
        else:
            parts = {"tool name": (text, "d"), "tool type": ("f", "d", text)}
            tools = [tool(*parts.get(context, ("f", text)))]
        return template.text(conversation, tools, header=False)

    return render


def reply_outline(template: ChatTemplate, reply: Message, number: int, following: Iterator[int]) -> Any:
    """Return the content of reply `number` with marks in place of its texts: mark 2 + 2 * number for the first text,
    then the marks numbered by `following` for the texts after an image."""
    if not reply.images:
        return template.marks[2 + 2 * number] if reply.content else ""
    marks = chain([2 + 2 * number], following)
    parts = content_parts(reply)
    return [IMAGE_PART if part is None else text_parts(template.marks[next(marks)])[0] for part in parts]


def continuation(
    template: ChatTemplate, style: CallStyle | None, end_text: str | None, replies: Sequence[Message]
) -> str:
    """Return the template's text after a sampled turn: the rest of the turn's end marker, the replies, and the next
    generation prompt."""
    placeholders = template.marks
    tool_replies = [number for number, reply in enumerate(replies) if reply.role == "tool"]
    failure: ValueError | None = None
    # Some templates accept only one call per turn, but any number of results.
    for count in dict.fromkeys((len(tool_replies), min(1, len(tool_replies)))):
        calls = [
            ToolCall(placeholders[3 + 2 * number], {"a": placeholders[1]}) for number in tool_replies[:count]
        ]
        turn = style.message(calls) if style and calls else {"role": "assistant", "content": placeholders[1]}
        answers: list[dict[str, Any]] = []
        following = count_from(2 + 2 * len(replies))
        # mark 2 + 2i is the text of reply i, mark 3 + 2i the name of its tool
        for number, reply in enumerate(replies):
            content = reply_outline(template, reply, number, following)
            answer = {"role": reply.role, "content": content}
            if reply.role == "tool":
                call_id = f"{CALL_ID}{min(len(answers), max(count - 1, 0))}"
                answer |= {"tool_call_id": call_id, "name": placeholders[3 + 2 * number]}
            answers.append(answer)
        try:
            without_answers = template.text([user(placeholders[0]), turn], header=False)
            conversation = template.text([user(placeholders[0]), turn, *answers])
        except ValueError as error:
            failure = error
            continue
        return _between(without_answers, conversation, (placeholders[0], placeholders[1]), end_text)
    assert failure is not None
    raise failure


def _between(without_answers: str, conversation: str, marks: tuple[str, str], end_text: str | None) -> str:
    """Return the part of `conversation` that follows the last turn of `without_answers`. `marks` are the marks of the
    user's message and of the end of that turn."""
    first, last = marks
    ending, rest = without_answers.rpartition(last)[2], conversation.rpartition(last)[2]
    if last not in conversation:
        raise ValueError("the chat template drops an assistant turn that has a reply")
    turn_end = ending.rindex(end_text) + len(end_text) if end_text and end_text in ending else len(ending)
    if not rest.startswith(ending[:turn_end]):
        other_end = re.match(TAG, rest)
        # gpt-oss ends the last turn with another token than the messages before it
        if (
            other_end
            and ending[:turn_end] == end_text
            and without_answers.partition(first)[2].startswith(other_end[0])
        ):
            return rest[other_end.end() :]
        raise ValueError("the chat template ends an assistant turn differently if it has a reply")
    return rest[turn_end:]
