"""Requests and replies of the three wire formats, field by field against those of the official SDKs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kits.sdk_capture import KEY, QUESTION, RESULTS, SAID, SCHEMA, SDKS, SYSTEM, CaptureServer
from TrainingFactory.common.endpoints.messages import ModelReply, ModelRequest
from TrainingFactory.common.endpoints.names import APIS, find_endpoint, is_endpoint, make_endpoint
from TrainingFactory.common.endpoints.transport import ModelError
from TrainingFactory.types import Message, ToolCall, ToolSpec

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures/sdk_requests"
APIS_OF_SDKS = {"openai": "openai", "anthropic": "anthropic", "google-genai": "gemini"}
BASES = {"openai": "/v1", "anthropic": "/v1", "gemini": "/v1"}
TOOL = ToolSpec("search", "Searches.", SCHEMA)


def conversation() -> list[Message]:
    calls = [ToolCall("search", {"query": query}, f"call_{n}") for n, query in enumerate(("boat", "bö"))]
    results = [
        Message("tool", text, tool_call_id=f"call_{n}", name="search") for n, text in enumerate(RESULTS)
    ]
    said = Message("assistant", SAID, calls, reasoning="of another model: not sent")
    return [Message("system", SYSTEM), Message("user", QUESTION), said, *results]


def plain(request: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls are JSON in a string, whose spelling is free."""
    for message in request["body"].get("messages", ()):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return request


@pytest.mark.parametrize("sdk", SDKS)
def test_a_request_equals_that_of_the_official_sdk(sdk: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOOPBACK_KEY", KEY)
    expected = json.loads((FIXTURES / f"{sdk}.json").read_text(encoding="utf-8"))
    server, api = CaptureServer(), APIS_OF_SDKS[sdk]
    request = ModelRequest(conversation(), [TOOL], temperature=0.5, max_tokens=64)

    async def send() -> ModelReply:
        url = f"{server.url}{BASES[api]}"
        endpoint = make_endpoint(model="m", api=api, base_url=url, api_key_env="LOOPBACK_KEY")  # type: ignore[arg-type]
        try:
            return await endpoint.ask(request)
        finally:
            await endpoint.close()

    try:
        reply = asyncio.run(send())
    finally:
        server.http.shutdown()
    assert expected.pop("sdk").startswith(f"{sdk} ")
    assert plain(server.requests[0]) == plain(expected)
    assert reply.text == "Bo." and reply.input_tokens > 0 and not reply.estimated


@cache
def captured() -> dict[str, Any]:
    """The requests of the installed SDKs, from a process of their own."""
    command = [sys.executable, "-m", "tests.kits.sdk_capture"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("sdk", SDKS)
def test_the_installed_sdk_still_sends_the_same_request(sdk: str):
    if sdk not in captured():
        pytest.skip(f"{sdk} is not installed")
    stored = json.loads((FIXTURES / f"{sdk}.json").read_text(encoding="utf-8"))
    assert captured()[sdk] | {"sdk": stored["sdk"]} == stored


REPLIES = {
    "openai": {
        "choices": [
            {
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
                    ],
                },
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4},
    },
    "anthropic": {
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s1"},
            {"type": "tool_use", "id": "t1", "name": "search", "input": {"query": "x"}},
        ],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 2, "cache_read_input_tokens": 7, "output_tokens": 4},
    },
    "gemini": {
        "candidates": [
            {
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "Hm.", "thought": True},
                        {
                            "functionCall": {"name": "search", "args": {"query": "x"}},
                            "thoughtSignature": "s1",
                        },
                    ],
                },
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {"promptTokenCount": 9, "candidatesTokenCount": 1, "thoughtsTokenCount": 3},
    },
}


@pytest.mark.parametrize("api", APIS)
def test_calls_thoughts_and_counts_of_a_reply(api: Any):
    endpoint = make_endpoint(model="m", api=api, base_url="http://127.0.0.1:1/v1")
    asked = ModelRequest([Message("user", QUESTION)], [TOOL])
    reply = endpoint.parse_reply(json.loads(json.dumps(REPLIES[api])), asked)
    [call] = reply.message.tool_calls
    assert (call.name, call.arguments) == ("search", {"query": "x"}) and call.id
    assert (reply.input_tokens, reply.output_tokens, reply.fault) == (9, 4, None)
    assert reply.message.reasoning == (None if api == "openai" else "Hm.")
    assert ModelReply.from_json(json.loads(json.dumps(reply.as_json()))) == reply
    # The next request repeats the provider's own form, with its signature, and names the call that is answered.
    result = Message("tool", "found", tool_call_id=call.id, name="search")
    later = ModelRequest(
        [*asked.messages, reply.message, result], [TOOL], original_messages={1: reply.original}
    )
    sent = json.dumps(endpoint.make_body(later))
    assert sent.count(f'"{call.id}"') == 2 and ('"s1"' in sent) == (api != "openai")


@pytest.mark.parametrize(
    ("api", "changed", "fault"),
    [
        ("openai", {"choices": [{"finish_reason": "length", "message": {"content": "It"}}]}, "cut"),
        ("openai", {"choices": [{"message": {"content": None, "refusal": "It"}}]}, "refused"),
        ("anthropic", {"content": [{"type": "text", "text": "It"}], "stop_reason": "max_tokens"}, "cut"),
        ("anthropic", {"content": [{"type": "text", "text": "It"}], "stop_reason": "refusal"}, "refused"),
        (
            "gemini",
            {"candidates": [{"content": {"parts": [{"text": "It"}]}, "finishReason": "MAX_TOKENS"}]},
            "cut",
        ),
        ("gemini", {"candidates": [{"finishReason": "SAFETY"}]}, "refused"),
        ("gemini", {"promptFeedback": {"blockReason": "SAFETY"}}, "refused"),
    ],
)
def test_truncated_and_refused_replies(api: Any, changed: dict[str, Any], fault: str):
    endpoint = make_endpoint(model="m", api=api, base_url="http://127.0.0.1:1/v1")
    reply = endpoint.parse_reply(changed, ModelRequest([Message("user", "x")]))
    assert reply.fault == fault and reply.text in ("It", "") and reply.estimated == ("usage" not in changed)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "data", [b"<html>", b"{}", b"[]", b'{"choices": [{}], "content": 3, "candidates": [7]}']
)
def test_a_malformed_response_is_an_error_with_the_host(api: Any, data: bytes):
    endpoint = make_endpoint(model="m", api=api, base_url="http://127.0.0.1:1/v1")
    with pytest.raises(ModelError, match=r"127\.0\.0\.1:1 did not return a "):
        endpoint.parse_response(
            data, lambda answer: endpoint.parse_reply(answer, ModelRequest([Message("user", "x")]))
        )


def test_options_change_and_remove_fields():
    endpoint = make_endpoint(
        model="openai:m", options={"max_completion_tokens": 9, "temperature": None, "seed": 1}
    )
    body = endpoint.make_body(
        ModelRequest([Message("user", "x")], sample_index=2, temperature=1.0, max_tokens=64)
    )
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "max_completion_tokens": 9,
        "seed": 3,
    }


def test_names_of_endpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    settings = find_endpoint("openai:ft:m:x@http://127.0.0.1:8000/v1")
    assert (settings.model, settings.base_url) == ("ft:m:x", "http://127.0.0.1:8000/v1")
    assert settings.make_endpoint().api_key_env is None
    gemini = find_endpoint("gemini:m").make_endpoint()
    assert gemini.url.endswith("googleapis.com/v1/models/m:generateContent")
    assert gemini.api_key_env == "GEMINI_API_KEY"
    monkeypatch.setenv("GOOGLE_API_KEY", "k")
    assert find_endpoint("gemini:m").make_endpoint().api_key_env == "GOOGLE_API_KEY"
    file = tmp_path / "teacher.yaml"
    file.write_text("model: m\nbase_url: http://127.0.0.1:1/v1\ncache: kept.sqlite\ninput_price: 2.0\n")
    stored = find_endpoint(str(file), max_cost=1.0)
    assert stored.cache == str(tmp_path / "kept.sqlite") and stored.budget.max_cost == 1.0
    assert is_endpoint(str(file)) and not is_endpoint("missing.yaml") and not is_endpoint("qwen3-4b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: m\n", "base_url must be a URL"),
        ("model: m\nbase_url: http://h/v1\nmax_cost: 1.0\n", "without prices"),
        ("model: m\nbase_url: http://h/v1\ninput_prise: 1.0\n", "did you mean input_price"),
        ("model: m\nbase_url: http://h/v1\nreplay: true\n", "replay is true without a recording"),
        ("model: openai:m\napi_key_env: sk-0123456789abcdefghij\n", "not the key itself"),
        ("- 1\n", "must be a mapping"),
        ("model: [\n", "cannot read"),
    ],
)
def test_mistakes_in_an_endpoint_file(tmp_path: Path, text: str, says: str):
    file = tmp_path / "teacher.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=says) as raised:
        find_endpoint(str(file)).make_endpoint()
    assert "sk-0123" not in str(raised.value)


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"ANTHROPIC_API_KEY .* is not set"):
        find_endpoint("anthropic:m").check_key()
