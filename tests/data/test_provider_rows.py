"""Rows in the formats of OpenAI's, Gemini's and Bedrock's tuning jobs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kits.cli import Run
from tests.kits.teacher import teaching
from TrainingFactory.data.provider_rows import to_provider_rows

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": ["string", "null"], "minLength": 1}},
            "required": ["query"],
        },
    },
}


def call(name: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": '{"query": "x"}'}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "content": "found", "tool_call_id": name, "name": "search"}


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}
ANSWER = {"role": "assistant", "content": "There.", "reasoning_content": "Hm."}
EPISODE = {"id": "1", "messages": [SYSTEM, USER, call("a"), result("a"), ANSWER], "tools": [TOOL]}
PAIR = {
    "id": "1",
    "prompt": [SYSTEM, USER],
    "chosen": [call("a"), result("a"), ANSWER],
    "rejected": [call("b"), result("b"), {"role": "assistant", "content": "No idea."}],
    "tools": [TOOL],
}


def converted(row: dict[str, Any], provider: Any) -> dict[str, Any]:
    [found] = to_provider_rows([row], provider, Counter())
    return found


def test_openai():
    row = converted(EPISODE, "openai")
    calling = {key: value for key, value in call("a").items() if key != "content"}
    replied = {"role": "tool", "tool_call_id": "a", "content": "found"}
    said = {"role": "assistant", "content": "There."}
    assert row["messages"] == [SYSTEM, USER, calling, replied, said] and row["tools"] == [TOOL]
    pair = converted(PAIR, "openai")
    assert pair["input"]["messages"] == [SYSTEM, USER, calling, replied]
    assert pair["preferred_output"] == [said]
    assert pair["non_preferred_output"] == [{"role": "assistant", "content": "No idea."}]


def test_gemini():
    row = converted(EPISODE, "gemini")
    assert row["systemInstruction"]["parts"] == [{"text": "Be brief."}]
    assert [content["role"] for content in row["contents"]] == ["user", "model", "user", "model"]
    assert row["contents"][1]["parts"] == [{"functionCall": {"name": "search", "args": {"query": "x"}}}]
    [declared] = row["tools"][0]["functionDeclarations"]
    assert declared["parameters"]["properties"] == {"query": {"type": "STRING", "nullable": True}}
    pair = converted(PAIR, "gemini")
    assert [each["score"] for each in pair["completions"]] == [1, 0]
    assert pair["contents"][-1]["parts"][0]["functionResponse"]["response"] == {"result": "found"}


def test_bedrock():
    row = converted(EPISODE, "bedrock")
    assert row["schemaVersion"] == "bedrock-conversation-2024" and row["system"] == [{"text": "Be brief."}]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "user", "assistant"]
    assert row["messages"][1]["content"] == [
        {"toolUse": {"toolUseId": "a", "name": "search", "input": {"query": "x"}}}
    ]
    assert row["toolConfig"]["tools"][0]["toolSpec"]["inputSchema"] == {
        "json": TOOL["function"]["parameters"]
    }
    with pytest.raises(ValueError, match="no tuning on pairs"):
        converted(PAIR, "bedrock")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([USER, call("a"), result("a")], "last message"),
        ([USER, call("a"), ANSWER], "no result"),
        ([USER, result("a"), ANSWER], "answers no call"),
        ([USER, {"role": "assistant", "content": ""}], "empty"),
        ([SYSTEM, ANSWER], "no user message"),
        ([USER, call("a b"), result("a b"), ANSWER], "ids of calls"),
        ([{"role": "user", "content": "User: hi"}, ANSWER], "begins with"),
    ],
)
def test_rows_that_a_format_can_not_hold_are_counted(messages: list[dict[str, Any]], says: str):
    dropped: Counter[str] = Counter()
    assert to_provider_rows([{"messages": messages}], "bedrock", dropped) == []
    [reason] = dropped
    assert says in reason


def test_pairs_of_whole_episodes_do_not_fit():
    dropped: Counter[str] = Counter()
    assert to_provider_rows([PAIR | {"rejected": [ANSWER]}], "openai", dropped) == [] and dropped


def test_untrained_turns_have_no_weight():
    row = converted({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, "openai")
    assert [message.get("weight") for message in row["messages"]] == [None, 0, None, None]


def test_the_command(tfactory: Run, tmp_path: Path):
    with teaching() as teacher:
        out = str(tmp_path / "t")
        assert (
            tfactory("data", "teach", "search", "--teacher", teacher.name(), "--out", out, "--tasks", "3")[0]
            == 0
        )
    episodes = str(tmp_path / "t/episodes.jsonl")
    for provider in ("openai", "gemini", "bedrock"):
        target = tmp_path / f"{provider}.jsonl"
        status, _, notes = tfactory("data", "convert", episodes, "--to", provider, "--out", str(target))
        assert status == 0 and f"upload the file to {provider}" in notes
        assert len([json.loads(line) for line in target.read_text().splitlines()]) == 3
    status, _, error = tfactory(
        "data", "convert", episodes, "--to", "kto", "--format", "openai", "--out", str(tmp_path / "k")
    )
    assert status == 2 and "sft and dpo" in error
