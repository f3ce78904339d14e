"""Tools from MCP servers, with servers of our own that also die, hang, babble and change."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits import mcp as kit
from tests.kits.mcp import call
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools import AsyncToolExecutor, MCPTools
from TrainingFactory.tools.mcp import connection as mcp_connection
from TrainingFactory.tools.mcp import servers as mcp_servers
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Message, Task, ToolCall, ToolFailure, ToolResult

PROGRAM = Path(sys.executable).name
pytestmark = pytest.mark.anyio
Started = Callable[[], set[int]]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def started() -> Iterator[Started]:
    """The processes that the test has started; after it they must be gone."""
    before = kit.children()
    yield lambda: kit.children() - before
    kit.wait_until(lambda: not kit.children() - before, 20)


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[MCPTools]:
    async with kit.plain() as tools:
        yield tools


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wait for a restart however slow the machine is."""
    monkeypatch.setattr(mcp_servers, "PATIENCE", 60.0)


async def pid_of(tools: MCPTools) -> int:
    return int((await call(tools, "count")).content.split()[1])


# what a source gives


def test_importing_tools_does_not_import_the_sdk() -> None:
    code = "import sys, TrainingFactory.tools.mcp.source; print([m for m in ('mcp', 'anyio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=kit.ROOT)
    assert done.stdout.strip() == "[]", done.stderr


async def test_loading_starts_nothing(started: Started) -> None:
    tools = kit.tiny()
    assert not started()
    with pytest.raises(
        ValueError, match=r"the servers tiny were not asked for their tools yet: await open\(\)"
    ):
        tools.session()


async def test_tools_of_a_server(shared: MCPTools) -> None:
    assert isinstance(shared, ToolSource) and not isinstance(shared, Tool)
    tool = kit.by_name(shared)["echo"]
    assert isinstance(tool, Tool)
    assert tool.spec.description == "Say it again."
    text = {"type": "string"}  # without the titles that the SDK adds
    assert tool.spec.parameters == {"type": "object", "properties": {"text": text}, "required": ["text"]}
    assert tool.options.server == "plain" and tool.options.version.startswith("1.2 ")
    assert [spec.name for spec in shared.specs] == list(kit.by_name(shared))
    assert await tool.run({"text": "hello"}) == ToolResult("hello")


async def test_one_connection_serves_many_calls_at_once(shared: MCPTools) -> None:
    before = await pid_of(shared)
    results = await asyncio.gather(*(call(shared, "echo", text=str(number)) for number in range(50)))
    assert [result.content for result in results] == [str(number) for number in range(50)]
    await shared.open()  # again does nothing
    assert await pid_of(shared) == before


async def test_an_environment_takes_them_as_they_are(shared: MCPTools) -> None:
    environment = ToolEnvironment(Task("t", "go"), tools=[shared])
    calls = [ToolCall("echo", {"text": "hi"}, "a"), ToolCall("echo", {"txt": "hi"}, "b")]
    good, bad = (await environment.step(Message("assistant", tool_calls=calls))).replies
    await environment.executor.close()
    assert (good.content, good.tool_call_id) == ("hi", "a")
    assert "text" in bad.content and bad.tool_call_id == "b"  # refused by its schema, without a call


async def test_cancelling_reaches_the_server(shared: MCPTools, tmp_path: Path) -> None:
    begun = tmp_path / "started"

    async def cancelled() -> int:
        return int((await call(shared, "how_many_cancelled")).content)

    async def reached(count: int) -> bool:
        return await cancelled() == count

    before = await cancelled()
    task = asyncio.ensure_future(call(shared, "sleep", seconds=600, started=str(begun)))
    await kit.until(begun.exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await kit.until(lambda: reached(before + 1))
    executor = AsyncToolExecutor([shared], timeout=3.0)
    (late,) = await executor.batch_execute([ToolCall("sleep", {"seconds": 600})])
    assert late.error == "timeout"
    await kit.until(lambda: reached(before + 2))


async def test_images_are_kept_and_shown_as_text(shared: MCPTools) -> None:
    result = await call(shared, "picture")
    assert result.content == "[image image/png, 2 kB]"
    (image,) = result.attachments
    assert (image["type"], image["mimeType"]) == ("image", "image/png") and len(image["data"]) > 2000


async def test_secrets_are_hidden_in_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", "sesame-1234")
    entry = kit.own("plain.py") | {"env": {"API": "${THE_TOKEN}", "PLACE": "/some/folder"}}
    async with MCPTools.from_dict({"mcpServers": {"plain": entry}}) as tools:
        assert (await call(tools, "environment", name="API")).content == "***"
        assert (await call(tools, "environment", name="PLACE")).content == "/some/folder"
        assert (await call(tools, "environment", name="PYTHONPATH")).content == ""  # not handed on


async def test_secrets_are_hidden_in_attachments() -> None:
    entry = kit.own("tiny.py") | {"env": {"DB_PASS": "sesame-1234", "DB": "pg://me:hunter22@db/x"}}
    async with MCPTools.from_dict({"mcpServers": {"tiny": entry}}) as tools:
        result = await call(tools, "say", text="everything")
    (resource,) = result.attachments
    for shown in (result.content, resource["text"]):
        assert "sesame" not in shown and "hunter22" not in shown and "pg://me:***@db/x" in shown


# servers that fail


@pytest.mark.usefixtures("patient")
async def test_a_server_that_dies_is_back_for_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    async with kit.tiny() as tools:
        before = await pid_of(tools)
        result = await call(tools, "die")
        assert (result.ok, result.error) == (False, "unavailable")
        assert f"server 'tiny' ({PROGRAM} tiny.py)" in result.content
        assert "the end is near" not in result.content
        assert await pid_of(tools) != before  # waits for the new process
    assert "the end is near" in caplog.text  # what it wrote to stderr, for the log


async def test_a_server_killed_from_outside_is_noticed_without_a_call(started: Started) -> None:
    async with kit.tiny() as tools:
        old = await pid_of(tools)
        os.kill(old, signal.SIGKILL)
        await kit.until(lambda: started() - {old})
        assert await pid_of(tools) != old


async def test_a_server_that_stays_away_answers_unavailable_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_servers, "PATIENCE", 0.1)
    monkeypatch.setattr(mcp_servers, "LONGEST_PAUSE", 0.2)
    port = kit.free_port()
    process = kit.start_plain("streamable-http", port)

    async def answers() -> bool:
        return (await call(tools, "echo", text="c")).ok

    with kit.running(process):
        async with MCPTools.from_dict(
            {"mcpServers": {"web": {"url": f"http://127.0.0.1:{port}/mcp"}}}
        ) as tools:
            assert await answers()
            calls = [asyncio.ensure_future(call(tools, "sleep", seconds=600)) for _ in range(3)]
            await asyncio.sleep(0.5)
            process.kill()
            in_flight = await asyncio.wait_for(asyncio.gather(*calls), 60)
            assert [result.error for result in in_flight] == ["unavailable"] * 3
            down = await call(tools, "echo", text="b")
            assert down.error == "unavailable" and f"127.0.0.1:{port}" in down.content
            with kit.running(kit.start_plain("streamable-http", port)):
                await kit.until(answers)


@pytest.mark.usefixtures("patient")
async def test_a_server_that_dies_at_every_call_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "pause", lambda failures: 0.0 if failures < 2 else 600.0)
    async with kit.tiny("fragile") as tools:
        results = [await call(tools, "count") for _ in range(6)]
    assert {result.error for result in results} == {"unavailable"}
    assert ["during the call" in result.content for result in results] == [True] * 2 + [False] * 4
    assert f"({PROGRAM} tiny.py) was lost: it closed the connection. It may" in results[-1].content


async def test_a_hung_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_connection, "CHECK_SECONDS", 0.3)
    async with kit.tiny() as tools:
        old = await pid_of(tools)
        os.kill(old, signal.SIGSTOP)
        (result,) = await AsyncToolExecutor([tools], timeout=0.3).batch_execute([ToolCall("count", {})])
        assert result.error == "timeout"
        back: list[ToolResult] = []

        async def answers() -> bool:
            back.append(await call(tools, "count"))
            return back[-1].ok

        await kit.until(answers)
        assert back[-1].content.split()[1] != str(old)


async def test_failures_at_the_start_are_told_all_at_once() -> None:
    modes = ("exit", "hang", "noise", "nonsense", "")
    entries: dict[str, Any] = {mode or "fine": kit.own("tiny.py", mode, connect_timeout=6) for mode in modes}
    entries["hang"]["tfactory"]["connect_timeout"] = 2
    entries["exit"]["env"] = {"API_KEY": "sesame-1234"}
    entries["nobody"] = {"url": f"http://127.0.0.1:{kit.free_port()}/mcp"}
    with pytest.raises(ValueError) as caught:
        await MCPTools.from_dict({"mcpServers": entries}).open()
    told = str(caught.value)
    for expected in (
        f"server 'exit' ({PROGRAM} tiny.py) could not be connected: it closed the connection; it wrote:",
        "the licence has expired with key ***",
        f"server 'hang' ({PROGRAM} tiny.py) could not be connected: it did not answer within 2 s\n",
        "1 lines on its stdout were no MCP messages, such as 'Welcome to tiny!'",
        f"server 'nonsense' ({PROGRAM} tiny.py) could not be connected: it did not answer",
    ):
        assert expected in told
    assert re.search(r"server 'nobody' .*nothing answers at that address", told)
    assert "fine" not in told and "sesame" not in told


async def test_noise_on_stdout_does_no_harm(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with kit.tiny("chatty") as tools:
        assert (await call(tools, "say", text="hi")).content == "hi"
    assert not caplog.text
    assert capfd.readouterr() == ("", "")  # neither the server nor the SDK wrote to the terminal


# what the config says


@pytest.mark.parametrize(
    ("mode", "settings", "told"),
    [
        ("schema", {}, "server 'tiny': tool bad: properties.x.type is no JSON schema"),
        ("schema", {}, "leave the tool out with tfactory.tools"),
        ("outside", {}, "refer to file:///etc/passwd, which is not in them"),
        ("", {"tools": ["sai"]}, "server 'tiny' offers no tool 'sai'; did you mean say?"),
        ("", {"pure": ["counts"]}, "server 'tiny' offers no tool 'counts'; did you mean count?"),
    ],
)
async def test_tools_that_cannot_be_used(mode: str, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        await kit.tiny(mode, **settings).open()


async def test_tools_that_are_there_twice() -> None:
    two = {"mcpServers": {"one": kit.own("tiny.py"), "my two": kit.own("tiny.py")}}
    async with MCPTools.from_dict(two) as tools:
        with pytest.raises(ValueError, match=r'the same name: .*say; .*"prefix": true'):
            AsyncToolExecutor([tools])
    two["mcpServers"]["my two"] = kit.own("tiny.py", prefix=True)
    async with MCPTools.from_dict(two) as tools:
        assert {"say", "my_two_say"} <= set(kit.by_name(tools))
        assert (await call(tools, "my_two_say", text="x")).content == "x"


async def test_settings_become_options() -> None:
    settings = {"pure": ["count"], "idempotent": ["die"], "timeout": 3, "concurrency": 4, "rate": 5}
    async with kit.tiny(**settings, retries=1, tools=["say", "count", "die"], prefix="t.") as tools:
        found = kit.by_name(tools)
    assert list(found) == ["t.say", "t.count", "t.die"]
    assert [tool.options.pure for tool in found.values()] == [False, True, False]
    assert [tool.options.idempotent for tool in found.values()] == [False, False, True]
    options = found["t.say"].options
    assert (options.timeout, options.concurrency, options.rate, options.retries) == (3, 4, 5, 1)
    assert not options.ordered


async def test_errors_that_come_as_plain_text() -> None:
    async with kit.tiny() as tools:
        assert (await call(tools, "fail")).ok
    async with kit.tiny(error_text="^Database error") as tools:
        result = await call(tools, "fail")
        assert (result.ok, result.error) == (False, "exception") and "no such table" in result.content


async def test_structured_answers_are_shown_and_held_to_their_schema() -> None:
    async with kit.tiny() as tools:
        assert await call(tools, "number") == ToolResult('{"n": 3}')
        await call(tools, "say", text="from now on it is wrong")
        result = await call(tools, "number")
        assert result.error == "exception" and "does not fit the server's own output schema" in result.content


async def test_the_form_with_one_tool_describes_it_anew() -> None:
    text = {"type": "string", "maxLength": 3}
    schema = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    command = f"{sys.executable} {kit.SERVERS / 'tiny.py'}"
    given = {"name": "say", "description": "Talk.", "parameters": schema, "mcp_server": command}
    async with MCPTools.from_dict([given, {"name": "count", "mcp_server": command}]) as tools:
        say, count = tools.specs
        assert (say.description, say.parameters) == ("Talk.", schema)
        assert count.parameters == {"type": "object", "properties": {}}
        assert (await call(tools, "say", text="x")).content == "x"
        assert (await call(tools, "count")).content.split()[0] == "1"  # the same server


async def test_a_list_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    async with kit.plain() as tools:
        before = tools.specs
        assert (await call(tools, "forget")).content == "forgotten"
        await kit.until(lambda: "changed its tools" in caplog.text)
        result = await call(tools, "echo", text="x")
        assert result.error == "exception" and "no longer offers echo" in result.content
        assert (await call(tools, "count")).ok and tools.specs == before
        assert "gone: echo" in caplog.text


@pytest.mark.usefixtures("patient")
async def test_a_list_that_is_another_one_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "marker"
    async with kit.tiny("other", str(marker)) as tools:
        marker.touch()
        await call(tools, "die")
        assert (await call(tools, "say", text="x")).ok
        assert (await call(tools, "count")).error == "exception"
    assert "gone: count, die, fail, number" in caplog.text


# connections


async def test_calls_are_spread_over_instances() -> None:
    async with kit.plain(instances=2) as tools:
        counts = await asyncio.gather(*(call(tools, "count") for _ in range(8)))
        assert len({result.content.split()[1] for result in counts}) == 2


async def test_every_episode_has_a_process_of_its_own(started: Started) -> None:
    async def episode(text: str) -> tuple[str, str]:
        session = tools.session()
        say, count = session.tools[:2]
        assert say.options.ordered
        await say.run({"text": text})
        said = await say.run({"text": text})
        pid = (await count.run({})).content.split()[1]
        await session.close()
        return said.content, pid

    async with kit.tiny(isolation="process", instances=2, max=3) as tools:
        outcomes = [
            *await asyncio.gather(*map(episode, "abcdef")),
            *await asyncio.gather(*map(episode, "abcdef")),
        ]
        assert [said for said, _ in outcomes] == [f"{text},{text}" for text in "abcdef"] * 2
        assert len({pid for _, pid in outcomes}) == 12
        await kit.until(lambda: len(started()) == 2)  # those that are kept ready


async def test_an_own_process_that_dies_ends_the_episode_and_no_other() -> None:
    async with kit.tiny(isolation="session") as tools:
        one, other = kit.by_name(tools), kit.by_name(tools)
        assert (await one["say"].run({"text": "x"})).ok
        with pytest.raises(ToolFailure, match="the session of this episode ended: server 'tiny'"):
            await one["die"].run({})
        with pytest.raises(ToolFailure):
            await one["say"].run({"text": "y"})
        assert (await other["say"].run({"text": "z"})).content == "z"


async def test_episodes_that_cannot_get_a_process_go_on_without(tmp_path: Path, started: Started) -> None:
    marker = tmp_path / "marker"

    async def fails() -> bool:
        return (await call(tools, "say", text="x")).error == "unavailable"

    async with kit.tiny("gone", str(marker), isolation="session", max=1) as tools:
        first, second = tools.session(), tools.session()
        assert (await first.tools[0].run({"text": "x"})).ok
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.tools[0].run({"text": "x"}), 0.3)  # all are in use
        await first.close()
        assert (await asyncio.wait_for(second.tools[0].run({"text": "y"}), 60)).content == "y"
        marker.touch()  # from now on it cannot start
        await second.close()
        await kit.until(fails)
        marker.unlink()
        assert (await call(tools, "say", text="z")).content == "z"


async def say(tools: MCPTools, timeout: float, runtime: ToolRuntime) -> ToolResult:
    """One episode."""
    executor = AsyncToolExecutor([tools], timeout=timeout)
    executor.attach(runtime, "one of many")
    try:
        return (await executor.batch_execute([ToolCall("say", {"text": "x"})]))[0]
    finally:
        await executor.close()


async def test_waiting_for_a_session_is_no_time_out_and_no_failure_of_the_server() -> None:
    async with kit.tiny(isolation="session", max=1) as tools:
        runtime = ToolRuntime(deadline=0.3)
        first = AsyncToolExecutor([tools])
        first.attach(runtime, "first")
        assert (await first.batch_execute([ToolCall("say", {"text": "x"})]))[0].ok
        for _ in range(4):
            turned_away = await say(tools, 0.3, runtime)
            assert turned_away.error == "unavailable" and "in use by others" in turned_away.content
        again = (await first.batch_execute([ToolCall("say", {"text": "y"})]))[0]
        assert (again.content, again.error) == ("x,y", None)  # its circuit is closed
        await first.close()
        assert (await say(tools, 60.0, runtime)).content == "x"


@pytest.mark.parametrize("isolation", ["shared", "process"])
async def test_the_start_of_a_server_is_not_in_the_time_out_of_a_call(isolation: str) -> None:
    tools = kit.tiny("slow", isolation=isolation)  # longer than the time-out
    await tools.open()
    await tools.close()
    assert (await say(tools, 3.0, ToolRuntime())).content == "x"  # started again
    await tools.close()


async def test_sessions_over_http(caplog: pytest.LogCaptureFixture) -> None:
    port = kit.free_port()
    entry = {"url": f"http://127.0.0.1:{port}/mcp?key=sesame", "tfactory": {"isolation": "session"}}
    caplog.set_level(logging.DEBUG)
    with kit.running(kit.start_plain("streamable-http", port)):
        async with MCPTools.from_dict({"mcpServers": {"web": entry}}) as tools:
            one, other = tools.session(), tools.session()
            assert (await one.tools[0].run({"text": "x"})).content == "x"
            assert (await other.tools[0].run({"text": "y"})).content == "y"
            await one.close()
            await other.close()
    assert "sesame" not in caplog.text


# the end


@pytest.mark.usefixtures("patient")
async def test_nothing_leaks_when_connections_come_and_go(shared: MCPTools) -> None:
    def held() -> tuple[int, int]:
        return psutil.Process().num_fds(), len(asyncio.all_tasks())

    before = held()
    async with kit.tiny() as tools, kit.tiny(isolation="process") as own:
        for _ in range(3):
            await call(tools, "die")
            assert (await call(tools, "count")).ok
        for _ in range(5):
            await call(own, "say", text="x")
    await kit.until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


@pytest.mark.parametrize("isolation", ["shared", "process"])
async def test_what_is_closed_opens_again_when_it_is_used(isolation: str, started: Started) -> None:
    tools = kit.tiny(isolation=isolation)
    for _ in range(2):
        await tools.open()
        await tools.close()
        await tools.close()  # again does nothing
        assert not started()
    assert (await call(tools, "say", text="x")).ok
    await tools.close()


def test_another_event_loop_has_connections_of_its_own(started: Started) -> None:
    tools = kit.tiny()

    async def first() -> int:
        await tools.open()
        return await pid_of(tools)

    async def second() -> tuple[int, int]:
        here = await pid_of(tools)
        elsewhere = await asyncio.to_thread(asyncio.run, pid_of(tools))  # at the same time
        assert await pid_of(tools) == here
        await tools.close()
        return here, elsewhere

    assert len({asyncio.run(first()), *asyncio.run(second())}) == 3
    assert not started()  # the end of a loop is the end of its servers


async def test_a_server_that_will_not_go_is_made_to(started: Started) -> None:
    async with kit.tiny("stubborn") as tools:
        assert (await call(tools, "count")).ok
    assert not started()


def test_a_forgotten_close_leaves_nothing_and_does_not_hang() -> None:
    code = (
        "import asyncio\nfrom tests.kits import mcp as kit\n"
        "async def main():\n"
        "    tools, own = kit.tiny(), kit.tiny(isolation='process', instances=2)\n"
        "    await tools.open()\n"
        "    await own.open()\n"
        "    print((await kit.call(tools, 'count')).content, *kit.children())\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=kit.ROOT, timeout=120
    )
    assert done.returncode == 0 and done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()[1:]]
    assert len(pids) >= 2
    kit.wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
