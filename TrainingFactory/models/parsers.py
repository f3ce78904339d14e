"""Read tool calls, one reader per syntax: text after the reasoning -> (content, calls). A reader never raises on what a
model can write: a call that cannot be read is returned with its `error`, which is what the model is told."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable
from typing import Any

from TrainingFactory.texts import valid_text
from TrainingFactory.types import ToolCall

CallReader = Callable[[str], tuple[str, list[ToolCall]]]
MAX_DEPTH = 64  # of nested arguments; what comes later (schema check, saving) walks them recursively


def read_tagged(text: str) -> tuple[str, list[ToolCall]]:
    """Read Qwen2.5, Qwen3, Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number."""
    unclosed = _unreadable("found <tool_call> without </tool_call> after it")
    outside, calls = "", list[ToolCall]()
    inside: str | None = None
    for part in re.split("(</?tool_call>)", text):
        if part == "<tool_call>":
            calls += [unclosed] if inside is not None else []
            inside = ""
        elif part == "</tool_call>" and inside is None:
            calls.append(_unreadable("found </tool_call> without <tool_call> before it"))
        elif part == "</tool_call>":
            calls.append(_call_from_json(str(inside)))
            inside = None
        elif inside is None:
            outside += part
        else:
            inside = part
    calls += [unclosed] if inside is not None else []
    return outside.strip() if calls else text, calls


def read_bare_json(text: str) -> tuple[str, list[ToolCall]]:
    """Read one or several JSON objects {"name": ..., "parameters" or "arguments": {...}}, maybe in a ```json fence."""
    body = text.strip()
    fence = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", body, re.DOTALL)
    if fence:
        body = fence.group(1)
    body = body.removeprefix("[").removesuffix("]") if body.startswith("[{") else body
    if not re.match(r'\{\s*"(name|function|type)"', body):
        return text, []
    calls, position = [], 0
    while position < len(body):
        try:
            value, position = _DECODER.raw_decode(body, position)
        except (ValueError, RecursionError):
            if not calls or body[position:].lstrip().startswith("{"):
                calls.append(_unreadable("the call is not valid JSON"))
            break
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        calls.append(_call_from_value(value))
        position += len(body[position:]) - len(body[position:].lstrip(" \t\r\n,;"))
    if all(call.error for call in calls) and '"name"' not in body:
        return text, []  # JSON, but no call: an answer
    return "", calls


def read_llama(text: str) -> tuple[str, list[ToolCall]]:
    """Read Llama 3.x: bare JSON; after <|python_tag|> JSON, name.call(key="value") or code."""
    before, tag, after = text.partition("<|python_tag|>")
    if not tag:
        return read_bare_json(text)
    content, calls = read_bare_json(after)
    if calls:
        return before.strip(), calls
    built_in = re.fullmatch(r"\s*(\w+)\.call\((.*)\)\s*", content, re.DOTALL)
    if built_in:
        return before.strip(), [_call_from_keywords(built_in.group(1), built_in.group(2))]
    return before.strip(), [ToolCall("python", {"code": content.strip()})]


def read_deepseek(text: str) -> tuple[str, list[ToolCall]]:
    """Read DeepSeek V3 and R1 (type, separator, name, fenced JSON) and V3.1 (name, separator, JSON)."""
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    content, *blocks = text.split(begin)
    calls = []
    for block in blocks:
        inside, closed, _ = block.partition(end)
        first, found, second = inside.partition(sep)
        if not closed or not found:
            calls.append(_unreadable(f"a call needs {sep} inside and {end} at its end"))
        elif first.strip() == "function":
            name, _, arguments = second.strip().partition("\n")
            fence = re.fullmatch(r"\s*```(?:json)?\s*(.*?)\s*```\s*", arguments, re.DOTALL)
            calls.append(_call(name, fence.group(1) if fence else arguments))
        else:
            calls.append(_call(first, second))
    if not calls and "<｜tool▁calls▁begin｜>" in text:
        calls.append(_unreadable(f"no call in it starts with {begin}"))
    return content.replace("<｜tool▁calls▁begin｜>", "").strip() if calls else text, calls


def _call_from_json(text: str) -> ToolCall:
    try:
        return _call_from_value(_decoded(text))
    except ValueError as error:
        return _unreadable(f"the call is {error}")


def _call_from_value(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        return _unreadable(f"the call is a JSON {type(value).__name__}, not an object")
    return _call(value.get("name"), value.get("arguments", value.get("parameters")))


def _call(name: Any, arguments: Any) -> ToolCall:
    """Return a call; in the OpenAI form and DeepSeek's its arguments are JSON text of their own."""
    if not isinstance(name, str) or not name.strip():
        return _unreadable('"name" must be the name of a tool')
    try:
        if isinstance(arguments, str):
            arguments = _decoded(arguments) if arguments.strip() else {}
        if not isinstance({} if arguments is None else arguments, dict):
            raise ValueError("no JSON object")
        return ToolCall(valid_text(name.strip()), _tidy(arguments or {}))
    except ValueError as error:
        return _unreadable(f"the arguments are {error}", name)


def _decoded(text: str) -> Any:
    try:
        return _DECODER.decode(text.strip())
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _call_from_keywords(name: str, keywords: str) -> ToolCall:
    """Read `key="value", other=2` as Python literals, which are never run."""
    try:
        tree = ast.parse(f"call({keywords})", mode="eval").body
        assert isinstance(tree, ast.Call)
        if tree.args or any(keyword.arg is None for keyword in tree.keywords):
            return _unreadable('arguments must be written as key="value"', name)
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
        json.dumps(values, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, AssertionError):
        return _unreadable('the arguments are not of the form key="value"', name)
    return _call(name, values)


def _tidy(value: Any, depth: int = 0) -> Any:
    """Return the value in plain JSON types and with every string in a form that has UTF-8."""
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, dict):
        return {valid_text(str(key)): _tidy(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tidy(item, depth + 1) for item in value]
    return value


def _finite(number: str) -> float | str:
    value = float(number)
    return value if math.isfinite(value) else number


# What JSON cannot hold (NaN, 1e999) stays text, and the schema check tells the model.
_DECODER = json.JSONDecoder(strict=False, parse_constant=str, parse_float=_finite)


def _unreadable(reason: str, name: str = "") -> ToolCall:
    return ToolCall(valid_text(name.strip()), error=f"The tool call could not be read: {reason}.")
