"""What the tests of rows share: the pieces of a dialogue with a tool, and short ways to read rows."""

from __future__ import annotations

from typing import Any

from TrainingFactory.data.examples import Examples, Form, load_examples
from TrainingFactory.services.training.dataset import arguments_fit

SEARCH = {
    "name": "search",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
USER = {"role": "user", "content": "Where is Kyoto?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "Kyoto"}'}}
    ],
}
RESULT = {"role": "tool", "content": "Japan", "tool_call_id": "c1"}
ANSWER = {"role": "assistant", "content": "In Japan."}
DIALOGUE = [USER, CALL, RESULT, ANSWER]
BROKEN = '<tool_call>{"name": "search", "arguments": {]</tool_call>'


def calling(name: str, arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def load(rows: list[Any], form: Form, **options: Any) -> Examples:
    return load_examples(rows, form, fits=arguments_fit, **options)


def one(row: dict[str, Any], form: Form = "sft") -> Any:
    (example,) = load([row], form).found
    return example.conversations[0] if len(example.conversations) == 1 else example.conversations
