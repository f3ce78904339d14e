"""Probes of a chat template with marks: which form of tool calls it accepts, whether it renders tools, how it ends a
turn, and what it writes between one assistant turn and the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from TrainingFactory.models.templates import ChatTemplate
from TrainingFactory.types import Message, ToolCall

CALL_ID = "call0000"  # plus one digit: some templates require ids of nine characters


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


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def find_call_style(template: ChatTemplate) -> CallStyle | None:
    """Return the first style in which the template renders a call's name and argument; None if there is none."""
    name, argument = template.marks[1], template.marks[2]
    for style in (CallStyle(as_text, empty) for as_text in (False, True) for empty in (None, "")):
        try:
            text = template.text([user("m"), style.message([ToolCall(name, {"a": argument})])], header=False)
        except ValueError:
            continue
        if name in text and argument in text and "None" not in text:
            return style
    return None


def tool(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def renders_tools(template: ChatTemplate) -> bool:
    name = template.marks[1]
    try:
        return name in template.text([user("m")], [tool(name, "d")])
    except ValueError:
        return False


def end_of_turn(template: ChatTemplate, control_texts: Iterable[str]) -> str | None:
    """Return the control token with which the template ends an assistant message; None if there is none."""
    mark = template.marks[1]
    text = template.text([user("m"), {"role": "assistant", "content": mark}], header=False)
    if mark not in text:
        raise ValueError("the chat template drops assistant messages without tool calls")
    rest = text.rpartition(mark)[2]
    ends = [(rest.index(control), -len(control), control) for control in control_texts if control in rest]
    return min(ends)[2] if ends else None


def end_of_calls(template: ChatTemplate, style: CallStyle | None, control_texts: Iterable[str]) -> str | None:
    """Return the control token that ends a turn with calls, unless it also occurs inside the turn (Gemma 4)."""
    try:
        turns = [style.message([ToolCall("f", {"a": "b"})] * count) if style else {} for count in (1, 2)]
        one, two = (template.text([user("m"), turn], header=False).rstrip() for turn in turns)
    except ValueError:
        return None
    ends = [text for text in control_texts if one.endswith(text) and two.endswith(text)]
    return next((text for text in ends if one.count(text) == two.count(text)), None)


def after_thought(body: str, think: tuple[str, str], opened: bool) -> str:
    """Return a turn without its leading thought."""
    thinks = opened or body.lstrip().startswith(think[0])
    return body.partition(think[1])[2] if thinks and think[1] in body else body


def shows_tool_results(template: ChatTemplate, style: CallStyle | None, end_text: str | None) -> bool:
    try:
        return template.marks[2] in continuation(template, style, end_text, [Message("tool", "r")])
    except ValueError:
        return False


def assistant_body(
    template: ChatTemplate, start: str, outline: dict[str, Any], think: tuple[str, str]
) -> str:
    """Return the assistant's part of a rendering, from the model's first token. `start` is the template's prompt for a
    user message that is mark 0."""
    whole = template.text([user(template.marks[0]), outline], header=False)
    if whole.startswith(start):
        return whole[len(start) :]
    # The header opens a thought that the finished turn no longer shows.
    before, opened, _ = start.rpartition(think[0])
    if not opened or not whole.startswith(before):
        raise ValueError("the chat template begins an assistant turn differently from its generation prompt")
    rest = whole[len(before) :]
    if start.rstrip().endswith(think[1]):
        return rest
    if rest.startswith(think[0]):  # an empty thought, without the white space after the header's tag
        return rest.removeprefix(think[0])
    thought = outline.get("reasoning_content", "")
    return thought + rest if rest.startswith(think[1]) else f"{thought}\n{think[1]}\n\n{rest}"


def make_renderer(template: ChatTemplate, what: str, style: CallStyle | None) -> Callable[[str], str]:
    """Return a function that renders the shortest conversation with its text at `what`: a role or part of a tool."""

    def render(text: str) -> str:
        tools: list[dict[str, Any]] = []
        calls = {"argument": ToolCall("f", {"a": text}), "nested argument": ToolCall("f", {"a": [text]})}
        call = calls.get(what)
        turn = {"role": "assistant", "content": "m"}
        if style:
            turn = style.message([call or ToolCall("f", {"a": "b"})])
        conversation = [user("m")]
        if what == "system":
            conversation = [{"role": "system", "content": text}, user("m")]
        elif what == "user":
            conversation = [user(text)]
        elif what == "assistant":
            conversation = [user("m"), {"role": "assistant", "content": text}]
        elif what == "tool":
            reply = {"role": "tool", "tool_call_id": f"{CALL_ID}0", "name": "f", "content": text}
            conversation = [user("m"), turn, reply]
        elif call:
            conversation = [user("m"), turn]
        else:
            tools = [tool(text, "d") if what == "tool name" else tool("f", text)]
        return template.text(conversation, tools, header=False)

    return render


def continuation(
    template: ChatTemplate, style: CallStyle | None, end_text: str | None, replies: Sequence[Message]
) -> str:
    """Return the template's text after a sampled turn: the rest of its end, the replies, the next generation prompt."""
    marks = template.marks
    tool_replies = [number for number, reply in enumerate(replies) if reply.role == "tool"]
    failure: ValueError | None = None
    # Some templates accept only one call per turn, but any number of results.
    for count in dict.fromkeys((len(tool_replies), min(1, len(tool_replies)))):
        calls = [ToolCall(marks[3 + 2 * number], {"a": marks[1]}) for number in tool_replies[:count]]
        turn = style.message(calls) if style and calls else {"role": "assistant", "content": marks[1]}
        answers: list[dict[str, Any]] = []
        # mark 2 + 2i is the text of reply i, mark 3 + 2i the name of its tool
        for number, reply in enumerate(replies):
            answer = {"role": reply.role, "content": marks[2 + 2 * number] if reply.content else ""}
            if reply.role == "tool":
                call_id = f"{CALL_ID}{min(len(answers), max(count - 1, 0))}"
                answer |= {"tool_call_id": call_id, "name": marks[3 + 2 * number]}
            answers.append(answer)
        try:
            alone = template.text([user(marks[0]), turn], header=False)
            whole = template.text([user(marks[0]), turn, *answers])
        except ValueError as error:
            failure = error
            continue
        return _between(alone, whole, marks[1], end_text)
    assert failure is not None
    raise failure


def _between(alone: str, whole: str, last: str, end_text: str | None) -> str:
    """Return the part of `whole` after the turn that `alone` ends with; `last` is the last mark inside the turn."""
    ending, rest = alone.rpartition(last)[2], whole.rpartition(last)[2]
    if last not in whole:
        raise ValueError("the chat template drops an assistant turn that has a reply")
    cut = ending.rindex(end_text) + len(end_text) if end_text and end_text in ending else len(ending)
    if not rest.startswith(ending[:cut]):
        raise ValueError("the chat template ends an assistant turn differently if it has a reply")
    return rest[cut:]
