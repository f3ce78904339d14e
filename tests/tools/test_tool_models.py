"""Tools that are models and agents, against a real HTTP server on the loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.kits.tools import one
from TrainingFactory.endpoint import Endpoint
from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools.builtin.making import make_tool
from TrainingFactory.tools.custom_tools import AgentTool, ModelTool, calculator
from TrainingFactory.types import (
    Message,
    ToolCall,
    ToolFailure,
    ToolResult,
    ToolSpec,
)

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-secret-1234"
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Server:
    """Answers as it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.answer: Answer = lambda body: (200, said("pong"))
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept

            def setup(self) -> None:
                outer.connections += 1
                super().setup()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                outer.headers.append(dict(self.headers) | {"path": self.path})
                status, reply = outer.answer(body)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                if status == 307:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    running = Server()
    yield running
    running.close()


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


def called(*calls: tuple[str, Any], **more: Any) -> dict[str, Any]:
    listed = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}} | more
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": listed}}]}


def expert(server: Server, **options: Any) -> ModelTool:
    given = {"retries": 0, "api_key_env": "OPENAI_API_KEY"}
    return ModelTool("expert", "Knows.", server.url, "big-model", **given | options)


def test_a_model_answers_under_its_own_prompt(server: Server):
    asking = expert(server, system_prompt="Be brief.", options={"temperature": 0, "max_tokens": 5})
    assert one(asking, {"prompt": "ping é"}).content == "pong"
    assert server.asked == [
        {
            "model": "big-model",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ping é"}],
            "temperature": 0,
            "max_tokens": 5,
        }
    ]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert server.headers[0]["path"] == "/v1/chat/completions"


def test_one_object_keeps_its_connection_and_serves_runs_one_after_another(server: Server):
    asking = expert(server)
    server.answer = lambda body: (200, said(body["messages"][0]["content"]))

    async def run() -> list[str]:
        executor = AsyncToolExecutor([asking])
        calls = [ToolCall("expert", {"prompt": str(number)}, str(number)) for number in range(8)]
        results = [(await executor.batch_execute([call]))[0] for call in calls[:4]]
        results += await executor.batch_execute(calls[4:])
        return [result.content for result in results]

    for _ in range(2):  # each in an event loop of its own
        before = server.connections
        assert asyncio.run(run()) == [str(number) for number in range(8)]
        assert 1 <= server.connections - before <= 4

    async def closed() -> None:
        await run()
        await asking.close()
        await asking.close()
        assert await run() == [str(number) for number in range(8)]  # opened anew

    asyncio.run(closed())


@pytest.mark.parametrize(
    ("status", "reply", "says", "kind"),
    [
        (500, b"oh dear", "status 500: oh dear", "unavailable"),
        (429, b"slow down", "status 429: slow down", "unavailable"),
        (401, f"bad key {KEY}".encode(), "status 401: bad key ***", "exception"),
        (307, b"over there", "status 307", "exception"),
        (200, b"<html>", "no chat completion", "exception"),
        (200, {"choices": []}, "no chat completion", "exception"),
        (200, {"choices": [{"message": 3}]}, "no chat completion", "exception"),
        (200, {"choices": [{"message": {"content": [{"image": 1}]}}]}, "no chat completion", "exception"),
        (200, b"[" * 100_000, "no chat completion", "exception"),
    ],
)
def test_errors_of_the_endpoint_in_words(server: Server, status: int, reply: Any, says: str, kind: str):
    server.answer = lambda body: (status, reply)
    result = one(expert(server), {"prompt": "x"})
    assert not result.ok and result.error == kind and says in result.content
    assert result.content.startswith("expert: 127.0.0.1:") and len(result.content) < 400
    assert KEY not in result.content and len(server.asked) == 1


def test_a_busy_endpoint_is_asked_again(server: Server):
    server.answer = lambda body: (200, said("at last")) if len(server.asked) > 1 else (503, b"busy")
    assert one(expert(server, retries=2), {"prompt": "x"}).content == "at last"
    assert len(server.asked) == 2


def test_slow_and_absent_endpoints(server: Server):
    release = threading.Event()

    def slowly(body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(60)
        return 200, said("too late")

    server.answer = slowly
    try:
        result = one(expert(server, timeout=2), {"prompt": "x"})
        assert result.error == "unavailable" and "did not answer within 2 s" in result.content
    finally:
        release.set()
    gone = ModelTool("expert", "", "http://127.0.0.1:1/v1", "m", retries=0)
    result = one(gone, {"prompt": "x"})
    assert result.error == "unavailable" and "could not be reached" in result.content


def test_the_key_is_read_at_the_call_and_kept_nowhere(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.delenv("OPENAI_API_KEY")
    asking = expert(server)
    result = one(asking, {"prompt": "x"})
    assert result.error == "exception" and "the environment variable OPENAI_API_KEY" in result.content
    assert server.asked == []
    assert one(expert(server, api_key_env=None), {"prompt": "x"}).content == "pong"
    assert "Authorization" not in server.headers[0]
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert one(asking, {"prompt": "x"}).content == "pong"
    assert KEY not in caplog.text and KEY not in repr(vars(asking)) + repr(vars(asking.endpoint))


def test_a_key_that_happens_to_be_there_goes_to_its_own_host_only(server: Server):
    asking = ModelTool("expert", "Knows.", server.url, "big-model")
    assert one(asking, {"prompt": "x"}).content == "pong" and "Authorization" not in server.headers[0]
    for host, variable in [
        ("https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
        ("http://api.openai.com/v1", None),
        ("https://api.openai.com.example.org/v1", None),
    ]:
        assert Endpoint(host, "m").api_key_env == variable


def agent(server: Server, tools: list[Any], **options: Any) -> AgentTool:
    return AgentTool("helper", "Helps.", Endpoint(server.url, "m"), tools, **options)


def ask(helper: AgentTool, prompt: str = "go") -> ToolResult:
    async def episode() -> ToolResult:
        executor = AsyncToolExecutor([helper])
        try:
            return (await executor.batch_execute([ToolCall("helper", {"prompt": prompt})]))[0]
        finally:
            await executor.close()

    return asyncio.run(episode())


def test_an_agent_uses_its_tools(server: Server):
    turns = [
        called(("calculator", '{"expression": "6*7"}'), ("calculator", '{"expression": "1/0"}')),
        said("It is 42."),
    ]
    server.answer = lambda body: (200, turns[len(server.asked) - 1])
    assert ask(agent(server, [calculator], system_prompt="Calculate."), "6*7?").content == "It is 42."
    first, second = server.asked
    assert first["tools"][0]["function"]["name"] == "calculator"
    assert [message["role"] for message in second["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    assert [call["id"] for call in second["messages"][2]["tool_calls"]] == ["c0", "c1"]
    good, bad = second["messages"][3:]
    assert (good["tool_call_id"], good["content"]) == ("c0", "42")
    assert bad["tool_call_id"] == "c1" and "ZeroDivisionError" in bad["content"]


def test_an_agents_mistakes_are_told_to_it(server: Server):
    turns = [
        called(("calculator", "{not json"), ("nothing", "{}"), ("calculator", "{}"), id=""),
        said("Sorry."),
    ]
    server.answer = lambda body: (200, turns[len(server.asked) - 1])
    assert ask(agent(server, [calculator])).content == "Sorry."
    replies = server.asked[1]["messages"][-3:]
    assert "not valid JSON" in replies[0]["content"] and "no tool named 'nothing'" in replies[1]["content"]
    assert "'expression' is a required property" in replies[2]["content"]
    calls = server.asked[1]["messages"][1]["tool_calls"]
    assert all("error" not in call for call in calls)  # strict endpoints refuse unknown keys
    assert len({call["id"] for call in calls}) == 3
    assert [reply["tool_call_id"] for reply in replies] == [call["id"] for call in calls]


def test_an_agent_that_never_answers_is_ended(server: Server):
    server.answer = lambda body: (200, called(("calculator", '{"expression": "1"}')))
    result = ask(agent(server, [calculator], max_turns=3))
    assert not result.ok and result.content == "helper came to no answer within 3 turns"
    assert len(server.asked) == 3


def test_an_agents_own_trouble_is_its_result(server: Server):
    server.answer = lambda body: (500, b"down")
    result = ask(agent(server, [calculator]))
    assert (
        result.error == "unavailable" and "helper: " in result.content and len(server.asked) == 1
    )  # not repeated

    @tool
    def lost() -> str:
        raise ToolFailure("its server is gone")

    @tool
    def down() -> ToolResult:
        return ToolResult("its server is down", ok=False, error="unavailable")

    for name, says in (("lost", "its server is gone"), ("down", "its server is down")):
        asked = len(server.asked)
        server.answer = lambda body, name=name: (200, called((name, "{}")))
        result = ask(agent(server, [lost, down]))
        assert result.error == "unavailable" and says in result.content
        assert len(server.asked) == asked + 1  # the outage shaped no answer


class Counting:
    """A source with state: each session counts for itself."""

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.ended = False

    async def open(self) -> None: ...

    def session(self) -> Any:
        self.opened += 1
        outer, count = self, [0]

        @tool(name="next")
        def following() -> int:
            count[0] += 1
            return count[0]

        class Session:
            tools = (following,)

            async def close(self) -> None:
                outer.closed += 1

        return Session()

    async def close(self) -> None:
        self.ended = True


def test_an_agents_sources_have_a_session_per_call(server: Server):
    server.answer = lambda body: (
        200,
        called(("next", "{}")) if len(body["messages"]) == 1 else said(body["messages"][-1]["content"]),
    )
    counting = Counting()
    helper = agent(server, [counting])
    assert [ask(helper).content for _ in range(2)] == ["1", "1"]
    assert (counting.opened, counting.closed) == (2, 2)
    asyncio.run(helper.close())
    assert counting.ended


def test_an_agent_from_a_config(server: Server):
    options: dict[str, Any] = {
        "name": "helper",
        "description": "Helps.",
        "model": {"base_url": server.url, "model": "m", "api_key_env": None},
        "tools": ["calculator"],
    }
    helper = make_tool({"name": "agent", "options": options})
    assert isinstance(helper, AgentTool) and ask(helper).content == "pong"


def test_an_agent_on_a_model_of_this_process():
    class Mine:
        async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Message:
            assert [spec.name for spec in tools] == ["calculator"]
            if len(messages) == 1:
                return Message("assistant", tool_calls=[ToolCall("calculator", {"expression": "2+2"})])
            return Message("assistant", f"done: {messages[-1].content}")

    assert ask(AgentTool("helper", "", Mine(), [calculator])).content == "done: 4"


def test_cancelling_an_episode_cancels_its_agent(server: Server):
    reached, stopped = threading.Event(), threading.Event()

    @tool
    async def hang() -> str:
        reached.set()
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.set()
        return ""

    server.answer = lambda body: (200, called(("hang", "{}")))

    async def episode() -> None:
        executor = AsyncToolExecutor([agent(server, [hang])])
        task = asyncio.create_task(executor.batch_execute([ToolCall("helper", {"prompt": "x"})]))
        deadline = time.monotonic() + 60
        while not reached.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await executor.close()

    asyncio.run(episode())
    assert stopped.is_set()


def test_the_spec_of_both(server: Server):
    wanted = {"prompt": {"type": "string", "description": "everything it needs to know"}}
    for spec in (expert(server).spec, agent(server, []).spec):
        assert isinstance(spec, ToolSpec) and spec.parameters["properties"] == wanted
    assert expert(server).options.idempotent and expert(server).options.server
    assert not agent(server, []).options.repeatable


def test_the_example_runs_offline():
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/model_and_agent_tools.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["translate: BONJOUR", "accountant: The total is 42."]
