"""Mistakes in datasets are told by row and column, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kits.data import ANSWER, BROKEN, DIALOGUE, SEARCH, USER, calling, load, one
from TrainingFactory.data import datasets as rows_of
from TrainingFactory.data.examples import Form, load_examples
from TrainingFactory.types import ToolCall

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
SYSTEM = {"role": "system", "content": "?"}
SHAREGPT = [{"from": "human", "value": "x"}, {"from": "function_call", "value": "{"}]


def with_tool(name: str, query: Any) -> dict[str, Any]:
    return {"messages": [USER, calling(name, {"query": query})], "tools": [SEARCH]}


@pytest.mark.parametrize(
    ("form", "row", "expected"),
    [
        ("sft", {"text": "x"}, 'sft needs "messages".*: text'),
        ("dpo", {"prompt": "x", "chosen": "y"}, 'dpo needs "chosen" and "rejected".*: prompt, chosen'),
        ("kto", {"prompt": "x", "completion": "y"}, 'kto needs "label"'),
        ("prm", {"messages": DIALOGUE}, 'prm needs "labels"'),
        ("sft", {"messages": []}, 'an empty "messages"'),
        ("sft", {"messages": "no"}, 'not valid JSON in "messages"'),
        ("sft", {"messages": [USER]}, 'no assistant message in "messages"'),
        ("sft", {"messages": [USER, ANSWER, ANSWER]}, "two consecutive assistant messages, 1 and 2"),
        ("sft", {"messages": [USER, {"role": "assistant", "content": ""}]}, "an empty assistant message 1"),
        ("sft", {"messages": [USER, {"role": "wizard"}]}, 'invalid message 1 in "messages".*wizard'),
        ("sft", {"messages": [USER, calling("search", "{")]}, "call of 'search' in message 1"),
        ("sft", {"messages": [USER, calling("search", "[1]")]}, "must be a JSON object"),
        ("sft", {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, "invalid message 1"),
        ("sft", {"messages": [USER, calling("", {})]}, "call without a name in message 1"),
        ("sft", with_tool("serach", "x"), "calls 'serach' in message 1.*not in \"tools\": search"),
        ("sft", with_tool("search", 3), '1 of "messages" .*arguments: search: `query` must be string, not 3'),
        ("sft", {"messages": DIALOGUE, "tools": [{"description": "x"}]}, 'invalid tool 0 in "tools"'),
        ("sft", {"conversations": [{"from": "elf", "value": "x"}]}, "role 'elf'"),
        ("sft", {"conversations": SHAREGPT}, "invalid call in message 1.*not valid JSON"),
        ("sft", {"prompt": "", "completion": "x"}, 'invalid "prompt"'),
        ("dpo", {"chosen": "a", "rejected": "b"}, 'has no "prompt", and "chosen" begins with the assistant'),
        ("dpo", {"chosen": [USER, ANSWER], "rejected": [SYSTEM, ANSWER]}, "no common prompt"),
        ("dpo", PAIR | {"rejected": "b"}, 'the same conversation in "chosen" and "rejected"'),
        ("rm", PAIR | {"margin": -1}, '"margin" of -1'),
        ("rm", PAIR | {"margin": "much"}, '"margin" of much'),
        ("kto", {"messages": DIALOGUE, "label": "good"}, "'good' in \"label\"; it must be true or false"),
        ("prm", {"messages": DIALOGUE, "labels": [1]}, 'has 1 "labels" for 2 assistant turns'),
        ("prm", {"prompt": "a", "completions": ["b"], "labels": [1, 0]}, 'has 2 "labels" for 1 "comp'),
        (
            "prm",
            {"messages": DIALOGUE, "labels": [1, "x"]},
            "'x' in \"labels\"; it must be true.*, or 1 or 0",
        ),
        ("prm", {"messages": DIALOGUE, "labels": [0.2, 1]}, "'0.2' in \"labels\"; it must be true or"),
        ("prm", {"messages": DIALOGUE, "labels": [0, -1]}, "'-1' in \"labels\"; it must be true or false"),
        ("sft", {"prompt": "a", "completion": "<tool_call>{bad"}, '1 of "completion".*without </tool_call>'),
        ("dpo", PAIR | {"chosen": BROKEN}, 'message 1 of "chosen".*not valid JSON'),
        ("sft", {"task": {}, "turns": []}, "is not a trajectory"),
    ],
)
def test_mistakes_are_told_by_row_and_column(form: Form, row: dict[str, Any], expected: str) -> None:
    fine = {**PAIR, "completion": "b"}
    if form in ("kto", "prm"):
        fine = {"messages": DIALOGUE, "label": True, "labels": [1, 0]}
    with pytest.raises(ValueError, match=f"(?s)^row 1 of the dataset .*{expected}"):
        load([fine, row, fine], form)
    found = load([fine, row, fine], form, skip_bad_rows=True)
    assert len(found) == 2 and len(found.row_problems) == 1 and found.num_rows == 3
    with pytest.raises(ValueError, match="no row of the dataset is valid"):
        load([row], form, skip_bad_rows=True)


def test_ten_mistakes_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        load([{"messages": []}] * 13, "sft")
    lines = str(caught.value).splitlines()
    assert len(lines) == 11 and lines[9].startswith("row 9 of the dataset") and lines[10] == "and 3 more"
    with pytest.raises(ValueError, match="the dataset is empty; dpo needs rows with"):
        load([], "dpo")


def test_a_schema_that_leads_elsewhere_is_not_followed() -> None:
    query = {"$ref": "http://x.invalid/y"}
    remote = {"name": "search", "parameters": {"type": "object", "properties": {"query": query}}}
    found = one({"messages": [USER, calling("search", {"query": 3})], "tools": [remote]})
    assert found.messages[1].tool_calls == [ToolCall("search", {"query": 3})]


def test_reading_goes_row_by_row(tmp_path: Path) -> None:
    """Of a long file only what is asked for is read."""
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 50 + "{\n")
    rows = rows_of.read_rows(path)
    assert next(rows).location.endswith("line 1")
    assert load_examples(path, "sft", count=50).num_rows == 50
    with pytest.raises(ValueError, match="line 51"):
        load_examples(path, "sft")
