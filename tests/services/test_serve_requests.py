"""What may stand in a request to `tfactory serve`: what would change the answer is done or told, the rest accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.kits.serve import Script, live, raw, tiny_chat

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
STRICT = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}}
TEXT = "héllo 🙂🙂 wörld END more 漢字 done"
Parts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with live(Script(lambda prompt: raw(TEXT)).server()) as found:
        yield found


def says(*parts: dict[str, Any]) -> Parts:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([USER | {"images": ["x"]}], "messages[0].images"),
        ([USER | {"prefix": True}], "messages[0].prefix"),
        ([USER, {"role": "assistant", "content": "x", "refusal": "no"}], "messages[1].refusal"),
        (
            [USER, {"role": "assistant", "content": "x", "function_call": {"name": "f"}}],
            "messages[1].function_call",
        ),
        (
            says({"type": "image_url", "image_url": {"url": "x"}, "text": "hi"}),
            "messages[0].content[0].type",
        ),
        (says({"text": "a"}, {"text": "x", "image_url": "y"}), "messages[0].content[1].image_url"),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"custom": {"a": 1}}]}],
            "messages[1].tool_calls[1].custom",
        ),
    ],
)
def test_messages_that_say_more_than_is_understood(client: httpx.Client, messages: Parts, param: str) -> None:
    assert refused(client, {"messages": messages}) == param


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "function", "function": STRICT | {"stric": 1}}], "tools[0].function.stric"),
        (
            [{"function": {"name": "g"}}, {"function": {"name": "f", "timeout": 3}}],
            "tools[1].function.timeout",
        ),
        ([{"function": {"name": ""}}], "tools[0].function.name"),
    ],
)
def test_tools_that_ask_for_more_than_is_done(client: httpx.Client, tools: Parts, param: str) -> None:
    assert refused(client, {"messages": [USER], "tools": tools}) == param
    assert refused(client, {"messages": [USER], "tools": tools, "tool_choice": "none"}) == param


def refused(client: httpx.Client, body: dict[str, Any]) -> str:
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] in error["message"]
    return error["param"]


def test_what_clients_send_without_meaning_anything_is_accepted(client: httpx.Client) -> None:
    empty: dict[str, Any] = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    empty |= {"images": [], "prefix": False}
    text = {"type": "text", "text": "hi", "annotations": [], "cache_control": {"type": "ephemeral"}}
    tool = {"name": "f", "description": None, "parameters": None, "strict": True}
    messages = [
        {"role": "user", "content": [text], "name": "me"} | empty,
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0, "custom": None}]} | empty,
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "4"},
        {"role": "assistant", "content": "4", "tool_calls": None, "reasoning_content": "hm"} | empty,
        USER,
    ]
    body = {"messages": messages, "tools": [{"type": "function", "function": tool}]}
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    again = [*messages, answer.json()["choices"][0]["message"], USER]  # what came from here is taken back
    assert client.post(CHAT, json={"messages": again}).status_code == 200


@pytest.mark.parametrize("stop", ["🙂 w", "🙂🙂", "END", "é", " ", "漢字", "字 d", "done"])
def test_every_token_before_a_stop_string_has_its_logprob(client: httpx.Client, stop: str) -> None:
    """Also where a character of several tokens stands right before it."""
    body = {"messages": [USER], "logprobs": True, "stop": stop}
    [choice] = client.post(CHAT, json=body).json()["choices"]
    before = TEXT[: TEXT.index(stop)]
    assert choice["message"]["content"] == before.strip()
    entries, ids, decode = choice["logprobs"]["content"], raw(TEXT), tiny_chat().decode
    assert decode(ids[: len(entries)]).startswith(before)
    assert not decode(ids[: len(entries) - 1]).startswith(before)
    lines = client.post(CHAT, json=body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [entry for each in told for entry in each["content"]] == entries
