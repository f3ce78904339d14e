"""What may stand in a request to `tfactory serve`: what would change the answer is done or told, the rest accepted."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kits.serve import (
    CHAT,
    WEATHER,
    events,
    joined,
    live,
    post,
    raw,
    script,
    tiny_chat,
    user,
)
from tests.kits.waiting import HANG, wait_until
from TrainingFactory.apps.serving.served import make_serving_config
from TrainingFactory.common.http import api, listen
from TrainingFactory.resolve.model_names import find_model

TEXT = "héllo 🙂🙂 wörld END more 漢字 done"
USER = {"role": "user", "content": "hi"}
UNKNOWN = {"role": "tool", "content": "4", "tool_call_id": "c9"}
MALFORMED = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{"}}]}
SAID = {"role": "assistant", "content": "x"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
STRICT = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}, "text": "hi"}
DEEP: dict[str, Any] = {}
for _ in range(600):
    DEEP = {"a": DEEP}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 4}]}, "messages[0].content"),
    ({"messages": [USER | {"content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [USER, UNKNOWN]}, "messages[1].tool_call_id"),
    ({"messages": [USER, {"role": "tool", "content": "4"}]}, "messages[1].tool_call_id"),
    ({"messages": [USER, MALFORMED]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls"),
    (user("word " * 3000), "messages"),
    (user(model="gpt-9"), "model"),
    (user(temperature=-0.1), "temperature"),
    (user(temperature=1e-30), "temperature"),
    (user(temperature="hot"), "temperature"),
    (user(temperature=True), "temperature"),
    (user(top_p=0), "top_p"),
    (user(top_p=1.5), "top_p"),
    (user(max_tokens=0), "max_tokens"),
    (user(max_tokens=1.5), "max_tokens"),
    (user(max_tokens=10**9), "max_tokens"),
    (user(max_completion_tokens=10**30), "max_completion_tokens"),
    (user(n=0), "n"),
    (user(n=10**6), "n"),
    (user(seed="x"), "seed"),
    (user(seed=2**70), "seed"),
    (user(stop=4), "stop"),
    (user(stop=["a", ""]), "stop[1]"),
    (user(stop=["x"] * 99), "stop"),
    (user(logprobs=3), "logprobs"),
    (user(logprobs=True, top_logprobs=5), "top_logprobs"),
    (user(stream="yes"), "stream"),
    (user(stream=True, stream_options={"other": True}), "stream_options.other"),
    (user(tools={}), "tools"),
    (user(tools=["f"]), "tools[0]"),
    (user(tools=[WEATHER, {"type": "function"}]), "tools[1].function"),
    (user(tools=[{"function": {"name": "f", "parameters": 3}}]), "tools[0].function.parameters"),
    (user(tools=[WEATHER], tool_choice="required"), "tool_choice"),
    (user(tools=[{"function": {"name": "f", "parameters": DEEP}}]), "messages"),
    (user(frequency_penalty=0.5), "frequency_penalty"),
    (user(response_format={"type": "json_object"}), "response_format.type"),
    (user(guided_json={}), "guided_json"),
    # what says more than is understood
    ({"messages": [USER | {"images": ["x"]}]}, "messages[0].images"),
    ({"messages": [USER | {"prefix": True}]}, "messages[0].prefix"),
    ({"messages": [USER, SAID | {"refusal": "no"}]}, "messages[1].refusal"),
    ({"messages": [USER, SAID | {"function_call": {"name": "f"}}]}, "messages[1].function_call"),
    ({"messages": [USER | {"content": [{"text": "a"}, IMAGE]}]}, "messages[0].content[1].type"),
    (
        {"messages": [USER | {"content": [{"text": "x", "image_url": "y"}]}]},
        "messages[0].content[0].image_url",
    ),
    (
        {"messages": [USER, SAID | {"tool_calls": [CALLED, CALLED | {"custom": {"a": 1}}]}]},
        "messages[1].tool_calls[1].custom",
    ),
    (user(tools=[{"type": "function", "function": STRICT | {"stric": 1}}]), "tools[0].function.stric"),
    (user(tools=[WEATHER, {"function": {"name": "f", "timeout": 3}}]), "tools[1].function.timeout"),
    (user(tools=[{"function": {"name": ""}}], tool_choice="none"), "tools[0].function.name"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with live(script(raw(TEXT)).server()) as found:
        yield found


@pytest.mark.parametrize(("body", "param"), WRONG, ids=[param for _, param in WRONG])
def test_mistakes_are_told_with_the_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = client.post(CHAT, json=body)
    error = answer.json()["error"]
    status = 404 if param == "model" else 400
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert error["code"] == "model_not_found" or status == 400
    assert param.split("[")[0].split(".")[-1] in error["message"] and error["type"] == "invalid_request_error"
    if len(answer.request.content) > 10_000:
        assert error["code"] == "context_length_exceeded" and "2000" in error["message"]


def test_what_is_no_request_at_all_is_told_too(client: httpx.Client) -> None:
    as_json = {"content-type": "application/json"}
    for content in (b"{", b"[1]", b"\xff\xfe", b"", b"[" * 100_000, b'{"messages": NaN}'):
        answer = client.post(CHAT, content=content, headers=as_json)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in ("body", "messages"), content
    huge = b'"' + b"x" * api.MAX_BODY_BYTES + b'"'
    assert client.post(CHAT, content=huge, headers=as_json).status_code == 413
    assert client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.get(CHAT).status_code == 405 and "error" in client.get("/v1/nothing").json()
    for host in ("evil.example", "[::1", "", "a:b:c", "127.0.0.1.evil.example"):
        answer = client.get("/health", headers={"host": host})
        assert answer.status_code in (400, 403), host
    assert client.get("/health", headers={"host": "LOCALHOST:8000"}).status_code == 200
    lone = client.post(CHAT, content=json.dumps(user("\ud800", max_tokens=1)), headers=as_json)
    assert lone.status_code == 200
    neutral = {"frequency_penalty": 0, "response_format": {"type": "text"}, "user": "me", "stop": None}
    post(client, user(max_tokens=1, **neutral))


def test_what_cannot_fit_is_refused_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is written and tokenised, which would take all memory and everybody's time."""
    scripted = script("ok")
    rendered: list[Any] = []
    monkeypatch.setattr(scripted, "chat", Recorder(scripted.chat, rendered))
    with live(scripted.server()) as client:
        many = [{"role": "user", "content": "x"}] * 1001  # each takes two tokens at least, of 2000
        for body in (user("x " * 50_000), user(tools=[WEATHER] * 1000), {"messages": many}):
            error = client.post(CHAT, json=body).json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages"), error
            assert "2000 tokens" in error["message"]
        assert not rendered and post(client, user())
        assert client.get("/health").json()["refused"] == 3


class Recorder:
    """A chat format that notes what it is asked to render."""

    def __init__(self, chat: Any, rendered: list[Any]) -> None:
        self._chat, self._rendered = chat, rendered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)

    def render(self, messages: Any, tools: Any) -> list[int]:
        if len(messages) > 100 or len(tools) > 100 or len(messages[0].content) > 1000:
            self._rendered.append(messages)
        return self._chat.render(messages, tools)


def test_a_request_that_is_being_read_counts_as_waiting() -> None:
    scripted = script("ok")
    server = scripted.server(slots=1, queue=0)
    go_on = threading.Event()
    server._thread.submit(go_on.wait, HANG)  # it reads something long
    with live(server) as client, ThreadPoolExecutor(1) as pool:
        try:
            first = pool.submit(post, client, user())
            wait_until(lambda: client.get("/health").json()["running"] == 1)
            assert client.post(CHAT, json=user()).status_code == 429
        finally:
            go_on.set()
        assert first.result(HANG)["choices"]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ("", b""),
        ("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-", b""),
        (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: LOCALHOST:80\r\ncontent-type: application/json\r\n"
            "content-length: 90\r\n\r\n{",
            b"408",
        ),
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_half_a_request_is_not_waited_for(
    sent: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "HEADER_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(api, "BODY_TIMEOUT_SECONDS", 0.2)
    with live(script("ok").server()) as client:
        place = (client.base_url.host, client.base_url.port)
        with socket.create_connection(place, timeout=10) as connection:
            connection.sendall(sent.encode())
            answer = b"".join(iter(lambda: connection.recv(4096), b""))  # until it hangs up
    assert expected in answer.partition(b"\r\n")[0] and bool(answer) == bool(expected)


def test_a_key_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    key = "sk-very-secret-é"
    with live(script("ok").server(), key) as client:
        for wrong in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic " + "x"}):
            for answer in (
                client.post(CHAT, json=user(), headers=wrong),
                client.get("/v1/models", headers=wrong),
            ):
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        right = {b"authorization": f"Bearer {key}".encode()}
        assert client.post(CHAT, json=user(), headers=right).status_code == 200
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.get("/health").status_code == 200
    out, err = capfd.readouterr()
    assert key not in out + err


def test_what_cannot_be_served_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMPTY_KEY", " ")
    for name in ("EMPTY_KEY", "NO_SUCH_KEY"):
        with pytest.raises(ValueError, match=name):
            listen.read_api_key(name)
    with listen.bind("127.0.0.1", 0) as taken, pytest.raises(ValueError, match="--port 0"):
        listen.bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ValueError, match="no-such-host"):
        listen.bind("no-such-host.invalid", 1)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "builtin:tiny"}')
    config = make_serving_config(find_model(str(tmp_path), tmp_path))
    assert (config.model.name, config.model.adapter) == ("builtin:tiny", str(tmp_path))


def test_what_clients_send_without_meaning_anything_is_accepted(client: httpx.Client) -> None:
    empty: dict[str, Any] = {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    empty |= {"images": [], "prefix": False}
    text = {"type": "text", "text": "hi", "annotations": [], "cache_control": {"type": "ephemeral"}}
    tool = {"name": "f", "description": None, "parameters": None, "strict": True}
    messages = [
        {"role": "user", "content": [text], "name": "me"} | empty,
        {"role": "assistant", "content": None, "tool_calls": [CALLED | {"index": 0, "custom": None}]} | empty,
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
    assert joined(events(client, body))["logprobs"] == entries
