"""Tools that are models and agents, against a real HTTP server on the loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import KEY, Judge, judging
from tests.kits.tools import one, play
from TrainingFactory.common.endpoints.openai import ChatEndpoint
from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools.custom_tools import AgentTool, ModelTool, calculator
from TrainingFactory.tools.making import make_tool
from TrainingFactory.types import Message, ToolCall, ToolFailure, ToolResult, ToolSpec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server(judge_key: None) -> Iterator[Judge]:
    with judging("pong") as running:
        yield running


def called(*calls: tuple[str, Any], **more: Any) -> bytes:
    listed = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}} | more
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": listed}
    return json.dumps({"choices": [{"message": message}]}).encode()


def expert(server: Judge, **options: Any) -> ModelTool:
    given = {"retries": 0, "api_key_env": "OPENAI_API_KEY"}
    return ModelTool("expert", "Knows.", server.url, "big-model", **given | options)


def test_a_model_answers_under_its_own_prompt(server: Judge):
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


@pytest.mark.parametrize(
    ("said", "says", "kind"),
    [
        ((500, b"oh dear"), "status 500: oh dear", "unavailable"),
        ((429, b"slow down"), "status 429: slow down", "unavailable"),
        ((401, f"bad key {KEY}".encode()), "status 401: bad key ***", "exception"),
        ((307, b"over there"), "status 307", "exception"),  # not followed
        (b"<html>", "chat completion", "exception"),
        (b'{"choices": []}', "chat completion", "exception"),
        (b'{"choices": [{"message": 3}]}', "chat completion", "exception"),
        (b'{"choices": [{"message": {"content": [{"image": 1}]}}]}', "chat completion", "exception"),
        (b"[" * 100_000, "chat completion", "exception"),
        (None, "could not be reached", "unavailable"),
    ],
)
def test_errors_of_the_endpoint_in_words(server: Judge, said: Any, says: str, kind: str):
    server.say = lambda prompt, number: said
    server.sends["Location"] = "http://127.0.0.1:1/elsewhere"
    result = one(expert(server), {"prompt": "x"})
    assert not result.ok and result.error == kind and says in result.content
    assert result.content.startswith("expert: 127.0.0.1:") and len(result.content) < 400
    assert KEY not in result.content and len(server.asked) == 1


def test_a_busy_and_a_slow_endpoint(server: Judge):
    server.say = lambda prompt, number: "at last" if number else 503
    assert one(expert(server, retries=2), {"prompt": "x"}).content == "at last"
    assert len(server.asked) == 2
    server.hang.clear()
    result = one(expert(server, timeout=0.5), {"prompt": "x"})
    assert result.error == "unavailable" and "did not answer within 0.5 s" in result.content


def test_the_key_is_read_at_the_call_and_kept_nowhere(
    server: Judge, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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


def test_a_key_that_happens_to_be_there_goes_to_its_own_host_only(server: Judge):
    asking = ModelTool("expert", "Knows.", server.url, "big-model")
    assert one(asking, {"prompt": "x"}).content == "pong" and "Authorization" not in server.headers[0]
    for host, variable in [
        ("https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
        ("http://api.openai.com/v1", None),
        ("https://api.openai.com.example.org/v1", None),
    ]:
        assert ChatEndpoint(host, "m").api_key_env == variable


def agent(server: Judge, tools: list[Any], **options: Any) -> AgentTool:
    return AgentTool("helper", "Helps.", ChatEndpoint(server.url, "m"), tools, **options)


def ask(helper: AgentTool, prompt: str = "go") -> ToolResult:
    return play([helper], ToolCall("helper", {"prompt": prompt}))[0]


def test_an_agent_uses_its_tools(server: Judge):
    turns = [
        called(("calculator", '{"expression": "6*7"}'), ("calculator", '{"expression": "1/0"}')),
        "It is 42.",
    ]
    server.say = lambda prompt, number: turns[number]
    assert ask(agent(server, [calculator], system_prompt="Calculate."), "6*7?").content == "It is 42."
    first, second = server.asked
    assert first["tools"][0]["function"]["name"] == "calculator"
    roles = [message["role"] for message in second["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "tool"]
    assert [call["id"] for call in second["messages"][2]["tool_calls"]] == ["c0", "c1"]
    good, bad = second["messages"][3:]
    assert (good["tool_call_id"], good["content"]) == ("c0", "42")
    assert bad["tool_call_id"] == "c1" and "ZeroDivisionError" in bad["content"]


def test_an_agents_mistakes_are_told_to_it(server: Judge):
    turns = [
        called(("calculator", "{not json"), ("nothing", "{}"), ("calculator", "{}"), id=""),
        "Sorry.",
    ]
    server.say = lambda prompt, number: turns[number]
    assert ask(agent(server, [calculator])).content == "Sorry."
    replies = server.asked[1]["messages"][-3:]
    assert "not valid JSON" in replies[0]["content"] and "no tool named 'nothing'" in replies[1]["content"]
    assert "'expression' is a required property" in replies[2]["content"]
    calls = server.asked[1]["messages"][1]["tool_calls"]
    assert all("error" not in call for call in calls)  # strict endpoints refuse unknown keys
    assert len({call["id"] for call in calls}) == 3
    assert [reply["tool_call_id"] for reply in replies] == [call["id"] for call in calls]


def test_an_agent_that_never_answers_is_ended(server: Judge):
    server.say = lambda prompt, number: called(("calculator", '{"expression": "1"}'))
    result = ask(agent(server, [calculator], max_turns=3))
    assert not result.ok and "helper" in result.content and "within 3 turns" in result.content
    assert len(server.asked) == 3


def test_an_agents_own_trouble_is_its_result(server: Judge):
    server.say = lambda prompt, number: 500
    result = ask(agent(server, [calculator]))
    assert result.error == "unavailable" and "helper: " in result.content
    assert len(server.asked) == 1  # not repeated

    @tool
    def lost() -> str:
        raise ToolFailure("its server is gone")

    @tool
    def down() -> ToolResult:
        return ToolResult("its server is down", ok=False, error="unavailable")

    for name, says in (("lost", "its server is gone"), ("down", "its server is down")):
        asked = len(server.asked)
        server.say = lambda prompt, number, name=name: called((name, "{}"))
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


def test_an_agents_sources_have_a_session_per_call(server: Judge):
    server.say = lambda prompt, number: prompt.splitlines()[-1] if number % 2 else called(("next", "{}"))
    counting = Counting()
    helper = agent(server, [counting])
    assert [ask(helper).content for _ in range(2)] == ["1", "1"]
    assert (counting.opened, counting.closed) == (2, 2)
    asyncio.run(helper.close())
    assert counting.ended


def test_an_agent_from_a_config(server: Judge):
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


async def test_cancelling_an_episode_cancels_its_agent(server: Judge):
    reached, stopped = asyncio.Event(), asyncio.Event()

    @tool
    async def hang() -> str:
        reached.set()
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.set()
        return ""

    server.say = lambda prompt, number: called(("hang", "{}"))
    executor = AsyncToolExecutor([agent(server, [hang])])
    task = asyncio.create_task(executor.batch_execute([ToolCall("helper", {"prompt": "x"})]))
    await asyncio.wait_for(reached.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await executor.close()
    assert stopped.is_set()


def test_the_spec_of_both(server: Judge):
    wanted = {"prompt": {"type": "string", "description": "everything it needs to know"}}
    for spec in (expert(server).spec, agent(server, []).spec):
        assert isinstance(spec, ToolSpec) and spec.parameters["properties"] == wanted
    assert expert(server).options.idempotent and expert(server).options.server
    assert not agent(server, []).options.repeatable


def test_the_example_runs_offline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    runpy.run_path(str(ROOT / "examples" / "model_and_agent_tools.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == ["translate: BONJOUR", "accountant: The total is 42."]
