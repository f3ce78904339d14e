"""Parsers of tool calls, one per syntax: text after the reasoning, and the available tools -> (content, calls).

A parser never raises on model output. It returns a malformed call with its `error`, which the model gets as the
result. Parsers that are learned from a chat template are in `forms.py`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from TrainingFactory.common.texts import replace_surrogates
from TrainingFactory.types import ToolCall, ToolSpec

CallReader = Callable[[str, Sequence[ToolSpec]], tuple[str, list[ToolCall]]]
_TOOL_CALL_TAG = re.compile("</?tool_call>")
_WHITE_SPACE = re.compile(r"\s*")
_CLOSING_BRACE = re.compile(r"\s*\}")
_TOOLS_TAG = re.compile(r"^[ \t]*<tools>\s*(.*?)\s*(?:</tools>|\Z)", re.MULTILINE | re.DOTALL)
MAX_ARGUMENT_DEPTH = 64  # of nested arguments, because the schema check and saving walk them recursively


def read_tagged(text: str, tools: Sequence[ToolSpec] = ()) -> tuple[str, list[ToolCall]]:
    """Parse <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number: Qwen2.5, Qwen3, Hermes. A tag inside
    a string of the arguments belongs to the string. Braces may be doubled, because the template of Qwen2.5-Coder shows
    an example with doubled braces. A call of one of the `tools` without these tags is malformed."""
    content, calls, position = "", list[ToolCall](), 0
    while tag := _TOOL_CALL_TAG.search(text, position):
        content += text[position : tag.start()]
        position = tag.end()
        if tag.group() == "</tool_call>":
            calls.append(make_malformed_call("found </tool_call> without <tool_call> before it"))
            continue
        try:
            call_value, end = _decode_braces(text, position)
        except (ValueError, RecursionError):
            call_value, end = None, position
        end_match = _TOOL_CALL_TAG.search(text, end)
        if end_match is None or end_match.group() == "<tool_call>":
            calls.append(make_malformed_call("found <tool_call> without </tool_call> after it"))
            position = end_match.start() if end_match else len(text)
        else:
            is_decoded = end > position and not text[end : end_match.start()].strip()
            call_text = text[position : end_match.start()]
            calls.append(parse_call_value(call_value) if is_decoded else _parse_call_json(call_text))
            position = end_match.end()
    if not calls:
        return _read_untagged(text, tools)
    return (content + text[position:]).strip(), calls


def _decode_braces(text: str, position: int) -> tuple[Any, int]:
    """Decode JSON at a position; its first and last brace may be doubled. Return the value and its end."""
    start = _WHITE_SPACE.match(text, position).end()  # type: ignore[union-attr]
    is_doubled = text.startswith("{{", start)
    value, end = JSON_DECODER.raw_decode(text, start + is_doubled)
    extra_brace = _CLOSING_BRACE.match(text, end) if is_doubled else None
    return value, extra_brace.end() if extra_brace else end


def _read_untagged(text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[ToolCall]]:
    """Return a malformed call for each call of one of the tools that is written as JSON without tags, in a fence or
    between <tools> and </tools>. It is not executed, because text that the model quotes may look like that."""
    names = {tool.name for tool in tools}
    tools_match = _TOOLS_TAG.search(text) if names else None
    content, calls = read_bare_calls(tools_match[1] if tools_match else text, tools) if names else (text, [])
    if not any(call.error or call.name in names for call in calls):
        return text, []
    reason = "write it between <tool_call> and </tool_call>"
    content = text[: tools_match.start()].strip() if tools_match else content
    return content, [make_malformed_call(reason, call.name) for call in calls]


def read_bare_calls(text: str, tools: Sequence[ToolSpec] = ()) -> tuple[str, list[ToolCall]]:
    """Parse JSON objects {"name": ..., "parameters" or "arguments": {...}} from the first line that begins with one,
    separated by white space, commas or semicolons, with or without a ```json fence. An object without arguments is a
    call only if it names a tool; any other JSON is the answer."""
    start_match = re.search(
        r'^[ \t]*(?:```(?:json)?\s*)?(\[?\s*(?=\{\s*"(?:name|function|type)"))', text, re.MULTILINE
    )
    if start_match is None:
        return text, []
    body = re.sub(r"\s*```\s*\Z", "", text[start_match.end() :])
    tool_names = [tool.name for tool in tools]
    calls, position = list[ToolCall](), 0
    while position < len(body):
        try:
            value, position = JSON_DECODER.raw_decode(body, position)
        except (ValueError, RecursionError):
            remaining_text = body[position:].lstrip()
            if not calls and not re.search(r'"(arguments|parameters)"', remaining_text):
                return text, []
            if not calls or remaining_text.startswith("{"):
                calls.append(make_malformed_call("the call is not valid JSON"))
            break
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if isinstance(value, dict) and (
            {"arguments", "parameters"} & {*value} or value.get("name") in tool_names
        ):
            calls.append(parse_call_value(value))
        elif not calls:
            return text, []
        position += len(body[position:]) - len(body[position:].lstrip(" \t\r\n,;"))
    return text[: start_match.start()].strip(), calls


def read_llama(text: str, tools: Sequence[ToolSpec] = ()) -> tuple[str, list[ToolCall]]:
    """Parse calls of Llama 3.x: bare JSON, or after <|python_tag|> JSON, name.call(key="value") or Python code."""
    text_before, call_tag, text_after = text.partition("<|python_tag|>")
    if not call_tag:
        return read_bare_calls(text, tools)
    content, calls = read_bare_calls(text_after, tools)
    if calls:
        return text_before.strip(), calls
    builtin_call = re.fullmatch(r"\s*(\w+)\.call\((.*)\)\s*", content, re.DOTALL)
    if builtin_call:
        return text_before.strip(), [parse_call_keywords(builtin_call.group(1), builtin_call.group(2))]
    return text_before.strip(), [ToolCall("python", {"code": content.strip()})]


def read_deepseek(text: str, tools: Sequence[ToolSpec] = ()) -> tuple[str, list[ToolCall]]:
    """Parse calls of DeepSeek V3 and R1 (type, separator, name, fenced JSON) and V3.1 (name, separator, JSON)."""
    begin_tag, separator_tag, end_tag = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    content, *blocks = text.split(begin_tag)
    calls = []
    for block in blocks:
        call_text, has_end, _ = block.partition(end_tag)
        first_field, separator, second_field = call_text.partition(separator_tag)
        if not has_end or not separator:
            calls.append(make_malformed_call(f"a call needs {separator_tag} inside and {end_tag} at its end"))
        elif first_field.strip() == "function":
            name, _, arguments = second_field.strip().partition("\n")
            fence = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", arguments, re.DOTALL)
            calls.append(make_call(name, fence.group(1) if fence else arguments))
        else:
            calls.append(make_call(first_field, second_field))
    if not calls and "<｜tool▁calls▁begin｜>" in text:
        calls.append(make_malformed_call(f"no call in it starts with {begin_tag}"))
    return content.replace("<｜tool▁calls▁begin｜>", "").strip() if calls else text, calls


def _parse_call_json(text: str) -> ToolCall:
    try:
        return parse_call_value(_decode_json(text))
    except ValueError as error:
        has_braces_in_strings = re.search(r'"[^"]*[{}][^"]*"(?=\s*[,:}\]])', text)
        if "{{" in text and not has_braces_in_strings:
            return _parse_call_json(text.replace("{{", "{").replace("}}", "}"))
        return make_malformed_call(f"the call is {error}")


def parse_call_value(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        return make_malformed_call(f"the call is a JSON {type(value).__name__}, not an object")
    return make_call(value.get("name"), value.get("arguments", value.get("parameters")))


def make_call(name: Any, arguments: Any) -> ToolCall:
    """Return a call from its name and arguments, which the OpenAI and DeepSeek formats encode as JSON text."""
    if not isinstance(name, str) or not name.strip():
        return make_malformed_call('"name" must be the name of a tool')
    try:
        if isinstance(arguments, str):
            arguments = _decode_json(arguments) if arguments.strip() else {}
        if not isinstance({} if arguments is None else arguments, dict):
            raise ValueError("no JSON object")
        return ToolCall(replace_surrogates(name.strip()), _to_plain_json(arguments or {}))
    except ValueError as error:
        return make_malformed_call(f"the arguments are {error}", name)


def _decode_json(text: str) -> Any:
    try:
        return JSON_DECODER.decode(text.strip())
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_call_keywords(name: str, keywords: str) -> ToolCall:
    """Parse `key="value", other=2` as literals of Python or JSON, without evaluating code."""
    try:
        tree = ast.parse(f"call({keywords})", mode="eval").body
        assert isinstance(tree, ast.Call)
        return parse_call_tree(name, tree)
    except (ValueError, SyntaxError, RecursionError, MemoryError, AssertionError):
        return make_malformed_call('the arguments are not of the form key="value"', name)


def parse_call_tree(name: str, tree: ast.Call) -> ToolCall:
    if tree.args or any(keyword.arg is None for keyword in tree.keywords):
        return make_malformed_call('arguments must be written as key="value"', name)
    try:
        nodes = {str(keyword.arg): _ConstantReplacer().visit(keyword.value) for keyword in tree.keywords}
        arguments = {key: ast.literal_eval(node) for key, node in nodes.items()}
        json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return make_malformed_call('the arguments are not of the form key="value"', name)
    return make_call(name, arguments)


class _ConstantReplacer(ast.NodeTransformer):
    """Replacement of JSON's `true`, `false` and `null`, which are variable names in Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def _to_plain_json(value: Any, depth: int = 0) -> Any:
    """Return the value in plain JSON types, with strings that can be encoded as UTF-8."""
    if depth > MAX_ARGUMENT_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {
            replace_surrogates(str(key)): _to_plain_json(child, depth + 1) for key, child in value.items()
        }
    if isinstance(value, list | tuple):
        return [_to_plain_json(child, depth + 1) for child in value]
    return value


def _parse_finite(number: str) -> float | str:
    value = float(number)
    return value if math.isfinite(value) else number


# Numbers that JSON cannot represent (NaN, 1e999) stay text, which the schema check rejects.
JSON_DECODER = json.JSONDecoder(strict=False, parse_constant=str, parse_float=_parse_finite)


def make_malformed_call(reason: str, name: str = "") -> ToolCall:
    return ToolCall(replace_surrogates(name.strip()), error=f"The tool call could not be read: {reason}.")
