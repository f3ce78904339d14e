"""Model families: how to parse completions, and how to write tools and calls where the chat template cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from TrainingFactory.common.openai_format import spec_to_dict
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.models.channels import NEXT_MESSAGE, read_channels
from TrainingFactory.models.parsers import CallReader, read_bare_calls, read_deepseek, read_llama, read_tagged
from TrainingFactory.types import Message, ToolCall, ToolSpec

THINK_TAGS = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Family:
    """Parsers of a model family. `read_calls` gets the text after the reasoning and the available tools.

    `tools_text` and the following fields are for templates that render no tools or calls. `tools_text` is trusted:
    control tokens in it stay control tokens. The (untrusted) tool list by `describe_tools` replaces `{tools}` in it.
    The last three fields are for turns of several messages: `read_turn` parses a whole turn with its thought,
    `message_break` is the text between two messages, `preamble` the header of a text, alone and before a call."""

    name: str
    read_calls: CallReader
    needs_token: str | None = None  # a control token that every tokenizer of this family has
    stop_texts: tuple[str, ...] = ()  # tokens that end a turn, besides the template's own
    think: tuple[str, str] = THINK_TAGS
    tools_text: str | None = None
    describe_tools: Callable[[Sequence[ToolSpec]], str] | None = None
    calls_text: Callable[[Sequence[ToolCall]], str] | None = None
    replies_as_user: bool = False  # send tool results as user messages
    read_turn: Callable[[str, Sequence[ToolSpec]], Message] | None = None
    message_break: str | None = None
    preamble: tuple[str, str] = ("", "")


def _list_as_json(tools: Sequence[ToolSpec]) -> str:
    return "\n".join(json.dumps(spec_to_dict(tool)["function"], ensure_ascii=False) for tool in tools)


def _list_as_sections(tools: Sequence[ToolSpec]) -> str:
    return "\n\n".join(
        f"### {tool.name}\nDescription: {tool.description}\n\n"
        f"Parameters: {json.dumps(tool.parameters, ensure_ascii=False)}"
        for tool in tools
    )


def _write_bare_calls(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in calls
    )


def _write_deepseek_calls(calls: Sequence[ToolCall]) -> str:
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n"
        f"{json.dumps(call.arguments, ensure_ascii=False)}\n```<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(blocks) + "<｜tool▁calls▁end｜>"


def _read_channel_calls(text: str, tools: Sequence[ToolSpec] = ()) -> tuple[str, list[ToolCall]]:
    message = read_channels(text, tools)
    return message.content, message.tool_calls


DEEPSEEK_TOOLS = """## Tools
You can use these tools:

{tools}

To use them, write exactly this form:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
ARGUMENTS
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
NAME is the name of one tool, ARGUMENTS a JSON object. Write one begin and end pair for every call."""

GENERIC_TOOLS = """You can use these tools, one JSON schema a line:
{tools}

To use a tool, answer with nothing but a JSON object: {"name": "NAME", "arguments": {"KEY": "VALUE"}}
Write one object a line to use several. The results come with the next message."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("qwen3", read_tagged, needs_token="<think>", stop_texts=("<|im_end|>", "<|endoftext|>")),
        Family("qwen2.5", read_tagged, stop_texts=("<|im_end|>", "<|endoftext|>")),
        Family(
            "llama3",
            read_llama,
            needs_token="<|python_tag|>",
            stop_texts=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        ),
        Family(
            "deepseek",
            read_deepseek,
            stop_texts=("<｜end▁of▁sentence｜>",),
            tools_text=DEEPSEEK_TOOLS,
            describe_tools=_list_as_sections,
            calls_text=_write_deepseek_calls,
        ),
        Family(
            "gpt-oss",
            _read_channel_calls,
            needs_token="<|channel|>",
            think=("<|channel|>analysis<|message|>", f"<|end|>{NEXT_MESSAGE}"),
            read_turn=read_channels,
            message_break=f"<|end|>{NEXT_MESSAGE}",
            preamble=("<|channel|>final", "<|channel|>commentary"),
        ),
        Family(
            "muse",
            _read_channel_calls,
            needs_token="<|eom|>",
            think=(" to=self<|message|>", f"<|eom|>{NEXT_MESSAGE}"),
            read_turn=read_channels,
            message_break=f"<|eom|>{NEXT_MESSAGE}",
        ),
        Family(
            "generic",
            read_bare_calls,
            tools_text=GENERIC_TOOLS,
            describe_tools=_list_as_json,
            calls_text=_write_bare_calls,
            replies_as_user=True,
        ),
    )
}


def register_family(family: Family) -> None:
    """Register a custom family, so that `chat_format(tokenizer, family=NAME)` finds it."""
    FAMILIES[family.name] = family


def get_family(name: str) -> Family:
    if name not in FAMILIES:
        hint = did_you_mean(nearest(name, FAMILIES))
        raise ValueError(f"model.family is {name!r}; known families: {', '.join(FAMILIES)}{hint}")
    return FAMILIES[name]
