"""Parser of turns that consist of several messages, each with a header that names its recipient or channel.

gpt-oss: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`, and
calls as `to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>`. Muse: `to=self`, `to=user` and
`to=NAME` instead of channels, with the arguments of a call as tagged pairs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from TrainingFactory.models.forms import parse_value
from TrainingFactory.models.parsers import make_call, make_malformed_call
from TrainingFactory.types import Message, ToolCall, ToolSpec

NEXT_MESSAGE = "<|start|>assistant"
BODY_TAG = "<|message|>"
_END_TAG = re.compile(r"<\|(?:end|return|call|eom|eot)\|>")
_RECIPIENT_PATTERN = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_PATTERN = re.compile(r"<\|channel\|>\s*(\w+)")
_INVOKE_TAG = re.compile(r'<atem:invoke name="([^"]*)">(.*?)</atem:invoke>', re.DOTALL)
_PARAMETER_TAG = re.compile(
    r'<atem:parameter name="([^"]*)">(.*?)</atem:parameter>(?=\s*(?:<atem:parameter |\Z))', re.DOTALL
)


def read_channels(text: str, tools: Sequence[ToolSpec] = ()) -> Message:
    """Parse a turn after the header `<|start|>assistant`. Only a message with a recipient is a call: the text of a
    thought is never searched for calls."""
    if BODY_TAG not in text:
        return Message("assistant", _END_TAG.split(text)[0].strip())
    thoughts, contents, calls = list[str](), list[str](), list[ToolCall]()
    for message_text in text.split(NEXT_MESSAGE):
        header, has_body, after_header = message_text.partition(BODY_TAG)
        body = _END_TAG.split(after_header)[0]
        recipient_match, channel_match = _RECIPIENT_PATTERN.search(header), _CHANNEL_PATTERN.search(header)
        recipient = recipient_match[1] if recipient_match else "user"
        if not has_body:  # a header that was cut
            continue
        if recipient not in ("user", "self", "assistant"):
            calls += _parse_calls(recipient.removeprefix("functions."), body, tools)
        elif recipient == "self" or (channel_match and channel_match[1] == "analysis"):
            thoughts.append(body.strip())
        else:
            contents.append(body.strip())
    reasoning = "\n".join(thoughts) if thoughts else None
    return Message("assistant", "\n".join(contents), calls, reasoning=reasoning)


def _parse_calls(name: str, body: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
    if "<atem:" not in body:
        return [make_call(name, body)]
    invocations = _INVOKE_TAG.findall(body)
    if not invocations:
        return [make_malformed_call('the call needs <atem:invoke name="..."> and </atem:invoke>', name)]
    calls = []
    for invoked_name, parameters in invocations:
        schemas = next(
            (tool.parameters.get("properties", {}) for tool in tools if tool.name == invoked_name), {}
        )
        parameter_pairs = _PARAMETER_TAG.findall(parameters)
        arguments = {key: parse_value(value, schemas.get(key)) for key, value in parameter_pairs}
        calls.append(make_call(invoked_name, arguments))
    return calls
