"""Parsers of tool calls that are learned from a chat template, by rendering canary calls.

The tags are learned. The syntax between them is one of five: a JSON object or a list of them, a name before a JSON
object (Mistral, DeepSeek), the same with bare keys and a special quote (Gemma), tagged pairs of keys and values
(Qwen3-Coder, GLM, Nemotron), and Python calls (LFM2). Models with one of these syntaxes need no code here.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from TrainingFactory.models.parsers import (
    JSON_DECODER,
    MAX_ARGUMENT_DEPTH,
    CallReader,
    make_call,
    make_malformed_call,
    parse_call_tree,
    parse_call_value,
)
from TrainingFactory.models.templates import Marks
from TrainingFactory.types import ToolCall, ToolSpec

# Returns the template's text of an assistant turn with these calls, without thought and end of turn.
RenderCalls = Callable[[Sequence[ToolCall]], str]
# Parses the calls at a position of a text; returns them and their end, or None if there is no call.
ParsedCalls = tuple[list[ToolCall], int]
ReadAt = Callable[[str, int, Sequence[ToolSpec]], ParsedCalls | None]
# Start and end of a canary call's text, and a function from the text that closes a call to its parser.
CallSyntax = tuple[int, int, Callable[[str], ReadAt]]


def learn_reader(render_calls: RenderCalls, placeholders: Marks) -> CallReader | None:
    """Return a parser of the calls that this template writes; None if their syntax is unknown."""
    arguments = {placeholders[2]: placeholders[3], placeholders[4]: placeholders[5]}
    one_call = render_calls([ToolCall(placeholders[1], arguments)])
    try:
        two_calls = render_calls([ToolCall(placeholders[1], arguments), ToolCall(placeholders[6], arguments)])
    except ValueError:  # this template accepts only one call per turn
        two_calls = one_call
    for find_syntax in (_find_json_syntax, _find_named_syntax, _find_python_syntax, _find_pair_syntax):
        syntax = find_syntax(one_call, placeholders[1], placeholders)
        if syntax is None:
            continue
        start, end, make_reader = syntax
        second_syntax = find_syntax(two_calls, placeholders[6], placeholders)
        text_before, tail = one_call[:start], one_call[end:]
        separator = two_calls[end : second_syntax[0]] if second_syntax else ""
        call_start = _find_common_suffix(text_before, separator) if separator else text_before
        close_tag = _find_common_prefix(tail, separator.removesuffix(call_start)) if separator else tail
        if call_start.strip():
            outer_begin, outer_close = text_before.removesuffix(call_start), tail.removeprefix(close_tag)
            return TaggedCallReader(outer_begin, call_start, close_tag, outer_close, make_reader(close_tag))
    return None


@dataclass(frozen=True, slots=True)
class TaggedCallReader:
    """Parser of calls enclosed in tags, with outer tags around all of them. Text outside the tags is content."""

    outer_begin: str
    begin: str
    close: str
    outer_close: str
    read_at: ReadAt

    def __call__(self, text: str, tools: Sequence[ToolSpec]) -> tuple[str, list[ToolCall]]:
        begin_pattern, close_pattern = _compile_literal(self.begin), _compile_literal(self.close)
        content, calls, position = "", list[ToolCall](), 0
        while start_match := begin_pattern.search(text, position):
            content += text[position : start_match.start()]
            parsed_calls = self.read_at(text, start_match.end(), tools)
            if parsed_calls is None:
                calls.append(make_malformed_call(f"what follows {self.begin.strip()} is not a whole call"))
                position = start_match.end()
                end_match = close_pattern.search(text, position) if self.close.strip() else None
                position = end_match.end() if end_match else len(text)
            else:
                calls += parsed_calls[0]
                end_match = close_pattern.match(text, parsed_calls[1])
                position = end_match.end() if end_match else parsed_calls[1]
        if not calls:
            return text, []
        content += text[position:]
        for outer_tag in (self.outer_begin.strip(), self.outer_close.strip()):
            content = content.replace(outer_tag, "", 1) if outer_tag else content
        return content.strip(), calls


def _find_json_syntax(text: str, name: str, placeholders: Marks) -> CallSyntax | None:
    """Return the syntax of calls written as {"name": NAME, "arguments": {...}}, with any keys in any order, or as a
    list of such objects."""
    for start in (bracket.start() for bracket in re.finditer(r"[\[{]", text)):
        value, end = _decode_json(text, start) or (None, 0)
        call_value = value[-1] if isinstance(value, list) and value else value
        keys = _find_call_object(call_value, name, placeholders[2])
        if keys is None:
            continue

        def read_at(
            text: str, position: int, tools: Sequence[ToolSpec], keys: tuple[list[str], str, str] = keys
        ) -> ParsedCalls | None:
            decoded = _decode_json(text, position)
            if decoded is None:
                return None
            call_objects = decoded[0] if isinstance(decoded[0], list) else [decoded[0]]
            return [_extract_call(call, keys) for call in call_objects], decoded[1]

        return start, end, lambda close: read_at
    return None


def _find_named_syntax(text: str, name: str, placeholders: Marks) -> CallSyntax | None:
    """Return the syntax of calls written as NAME, a separator and {...}, as JSON or with bare keys and a special
    quote."""
    start = text.find(name)
    name_end = start + len(name)
    brace_start = text.find("{", name_end) if start >= 0 else -1
    if brace_start < 0:
        return None
    bare_key_pattern = rf"\{{{placeholders[2]}:(?P<quote>\S+?){placeholders[3]}(?P=quote),"
    bare_key_match = re.compile(bare_key_pattern).match(text, brace_start)
    decode = _make_decoder(bare_key_match["quote"]) if bare_key_match else _decode_json
    arguments = decode(text, brace_start)
    if arguments is None or arguments[0] != {
        placeholders[2]: placeholders[3],
        placeholders[4]: placeholders[5],
    }:
        return None
    separator_pattern = re.compile(_make_loose_pattern(text[name_end:brace_start]) + r"\s*(?=\{)")

    def read_at(text: str, position: int, tools: Sequence[ToolSpec]) -> ParsedCalls | None:
        separator = separator_pattern.search(text, position)
        decoded = decode(text, separator.end()) if separator else None
        if separator is None or decoded is None:
            return None
        return [make_call(text[position : separator.start()], decoded[0])], decoded[1]

    return start, arguments[1], lambda close: read_at


def _find_python_syntax(text: str, name: str, placeholders: Marks) -> CallSyntax | None:
    """Return the syntax of calls written as [NAME(KEY=VALUE, ...), ...]."""
    calls_match = re.search(rf"\[[^\[]*\b{name}\({placeholders[2]}\s*=.*\)\s*\]", text, re.DOTALL)
    if calls_match is None:
        return None

    def make_reader(close: str) -> ReadAt:
        end_pattern = _compile_literal(close) if close.strip() else re.compile(r"\Z")

        def read_at(text: str, position: int, tools: Sequence[ToolSpec]) -> ParsedCalls | None:
            end_match = end_pattern.search(text, position)
            end = end_match.start() if end_match else -1
            return _parse_python_calls(text[position:end].strip(), end) if end_match else None

        return read_at

    return calls_match.start(), calls_match.end(), make_reader


def _parse_python_calls(code: str, end: int) -> ParsedCalls | None:
    for text in (code, code.replace("\n", "\\n")):  # some templates do not escape newlines in strings
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(text, mode="eval").body
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        elements = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = [element for element in elements if isinstance(element, ast.Call)]
        are_names = all(isinstance(call.func, ast.Name | ast.Attribute) for call in calls)
        if elements and are_names and len(calls) == len(elements):
            return [parse_call_tree(ast.unparse(call.func), call) for call in calls], end
    return None


def _find_pair_syntax(text: str, name: str, placeholders: Marks) -> CallSyntax | None:
    """Return the syntax of calls written as NAME and any number of tagged key-value pairs."""
    start = text.find(name)
    tag_texts = re.split("|".join(placeholders[n] for n in range(2, 6)), text[start + len(name) :])
    if start < 0 or len(tag_texts) < 5:
        return None
    before_key, before_value, separator, next_before_value, call_tail = tag_texts[:5]
    key_start = _find_common_suffix(before_key, separator)
    pair_end = separator.removesuffix(key_start)
    if (
        next_before_value != before_value
        or not before_value.strip()
        or not key_start.strip()
        or not call_tail.startswith(pair_end)
    ):
        return None
    end = (
        start
        + len(name)
        + len(text[start + len(name) :].partition(placeholders[5])[0])
        + len(placeholders[5] + pair_end)
    )
    preamble = before_key.removesuffix(key_start)

    def make_reader(close: str) -> ReadAt:
        first_key_pattern, no_key = _compile_literal(preamble + key_start), _compile_literal(preamble + close)
        next_key_pattern = re.compile(_make_tight_pattern(pair_end) + _make_loose_pattern(key_start))
        call_end_pattern = re.compile(f"{_make_tight_pattern(pair_end)}(?={_make_loose_pattern(close)})")
        value_start = re.compile(_make_tight_pattern(before_value))
        return _PairReader(first_key_pattern, no_key, value_start, next_key_pattern, call_end_pattern).read_at

    return start, end, make_reader


@dataclass(frozen=True, slots=True)
class _PairReader:
    """Parser of a name and tagged key-value pairs. Its patterns match the tags between them."""

    first_key: re.Pattern[str]
    no_key: re.Pattern[str]
    value_start: re.Pattern[str]
    next_key: re.Pattern[str]
    call_end: re.Pattern[str]

    def read_at(self, text: str, position: int, tools: Sequence[ToolSpec]) -> ParsedCalls | None:
        first_match, end_match = self.first_key.search(text, position), self.no_key.search(text, position)
        if end_match and (first_match is None or end_match.start() < first_match.start()):
            return [make_call(text[position : end_match.start()], {})], end_match.start()
        if first_match is None:
            return None
        name, arguments = text[position : first_match.start()].strip(), dict[str, Any]()
        position = first_match.end()
        schemas = next((tool.parameters.get("properties", {}) for tool in tools if tool.name == name), {})
        while True:
            value_match = self.value_start.search(text, position)
            if value_match is None:
                return None
            key = text[position : value_match.start()].strip()
            next_match = self.next_key.search(text, value_match.end())
            end_match = self.call_end.search(text, value_match.end())
            tag_match = min((tag for tag in (next_match, end_match) if tag), key=re.Match.start, default=None)
            if tag_match is None:
                return None
            arguments[key] = parse_value(text[value_match.end() : tag_match.start()], schemas.get(key))
            position = tag_match.end()
            if tag_match is end_match:
                return [make_call(name, arguments)], position


PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def parse_value(text: str, schema: Any) -> Any:
    """Parse an unquoted argument as JSON or a Python constant. Return the text itself if only that fits the schema."""
    value, end = _decode_json(text, 0) or (text, 0)
    if text[end:].strip() or isinstance(value, str):
        value = PYTHON_CONSTANTS.get(text.strip(), text)
    types = _find_allowed_types(schema)
    if types is None or "string" not in types:
        return value
    value_type = JSON_TYPES.get(type(value), "null")
    return value if value_type in types or (value_type == "integer" and "number" in types) else text


def _find_allowed_types(schema: Any) -> set[str] | None:
    """Return the JSON types that a property's schema allows; None if it does not restrict them."""
    if not isinstance(schema, dict):
        return None
    for key in ("anyOf", "oneOf"):
        if isinstance(alternatives := schema.get(key), list):
            types = [_find_allowed_types(alternative) for alternative in alternatives]
            return None if None in types else set[str]().union(*filter(None, types))
    declared_type = schema.get("type")
    if isinstance(declared_type, list):
        return {str(name) for name in declared_type}
    return None if declared_type is None else {str(declared_type)}


def _decode_json(text: str, position: int) -> tuple[Any, int] | None:
    space_match = re.compile(r"\s*").match(text, position)
    try:
        return JSON_DECODER.raw_decode(text, space_match.end() if space_match else position)
    except (ValueError, RecursionError):
        return None


def _make_decoder(quote: str) -> Callable[[str, int], tuple[Any, int] | None]:
    """Return a decoder of {key:QUOTEtextQUOTE,other:[1,true]}."""
    token_pattern = re.compile(
        rf"\s*(?:{re.escape(quote)}(.*?){re.escape(quote)}|([{{}}\[\]:,])|([^{{}}\[\]:,<]+))", re.DOTALL
    )

    label_pattern = re.compile(
        rf"\s*(?:{re.escape(quote)}(.*?){re.escape(quote)}\s*|([^:{{}}]*)):", re.DOTALL
    )

    def decode_value(text: str, position: int, depth: int) -> tuple[Any, int]:
        token_match = token_pattern.match(text, position)
        if token_match is None or depth > MAX_ARGUMENT_DEPTH or (token_match[2] or "{") not in "{[":
            raise ValueError("no value")
        position = token_match.end()
        if token_match[1] is not None:
            return token_match[1], position
        if token_match[3] is not None:
            bare_value = token_match[3].strip()
            decoded = _decode_json(bare_value, 0) or (bare_value, 0)
            return PYTHON_CONSTANTS.get(bare_value, decoded[0]), position
        is_object = token_match[2] == "{"
        members = list[tuple[str, Any]]()
        while not (end_match := re.compile(r"\s*,?\s*[}\]]").match(text, position)):
            comma_match = re.compile(r"\s*,").match(text, position)
            position, key = comma_match.end() if comma_match else position, ""
            if is_object:
                label_match = label_pattern.match(text, position)
                if label_match is None:
                    raise ValueError("no key")
                key = label_match[2].strip() if label_match[1] is None else label_match[1]
                position = label_match.end()
            value, position = decode_value(text, position, depth + 1)
            members.append((key, value))
        return dict(members) if is_object else [value for _, value in members], end_match.end()

    def decode(text: str, position: int) -> tuple[Any, int] | None:
        try:
            return decode_value(text, position, 0)
        except ValueError:
            return None

    return decode


def _find_call_object(value: Any, name: str, key: str) -> tuple[list[str], str, str] | None:
    """Find a call's object in decoded JSON. Return the keys that lead to it, its name key and its arguments key."""
    for field, field_value in value.items() if isinstance(value, dict) else ():
        if field_value == name:
            arguments = [
                argument for argument, item in value.items() if argument != field and key in str(item)
            ]
            return ([], field, arguments[0]) if arguments else None
        if inner_keys := _find_call_object(field_value, name, key):
            return [field, *inner_keys[0]], inner_keys[1], inner_keys[2]
    return None


def _extract_call(value: Any, keys: tuple[list[str], str, str]) -> ToolCall:
    path_keys, name_key, arguments_key = keys
    for key in path_keys:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, dict):
        value = {"name": value.get(name_key), "arguments": value.get(arguments_key)}
    return parse_call_value(value)


def _find_common_suffix(text: str, other_text: str) -> str:
    return _find_common_prefix(text[::-1], other_text[::-1])[::-1]


def _find_common_prefix(text: str, other_text: str) -> str:
    lengths = range(min(len(text), len(other_text)), -1, -1)
    return next(text[:length] for length in lengths if text[:length] == other_text[:length])


def _compile_literal(text: str) -> re.Pattern[str]:
    return re.compile(r"\s*" + _make_loose_pattern(text.strip()))


def _make_tight_pattern(text: str) -> str:
    """Return a pattern for a tag next to a value. White space, except the tag's newline, belongs to the value."""
    return re.escape(text).replace("\\\n", "\n?")


def _make_loose_pattern(text: str) -> str:
    """Return a pattern for the text that accepts missing or different white space."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))
