"""Tools from MCP servers, with servers of our own that also die, hang, babble and change."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits import mcp as kit
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools import AsyncToolExecutor, MCPTools
from TrainingFactory.tools.mcp import connection as mcp_connection
from TrainingFactory.tools.mcp import pool as mcp_pool
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Message, Task, ToolCall, ToolFailure, ToolResult

PROGRAM = Path(sys.executable).name


@pytest.fixture(autouse=True)
def started() -> Iterator[Callable[[], set[int]]]:
    """The processes that the test has started; after it they must be gone."""
    before = kit.children()
    yield lambda: kit.children() - before
    kit.wait_until(lambda: not kit.children() - before, 20)


Started = Callable[[], set[int]]


@pytest.fixture(scope="module")
def shared() -> Iterator[MCPTools]:
    with kit.plain() as tools:
        yield tools


def run(tools: MCPTools, tool: str, /, **arguments: Any) -> ToolResult:
    return asyncio.run(kit.by_name(tools)[tool].run(arguments))


def wrong(mode: str, *arguments: str, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:
        kit.tiny(mode, *arguments, **settings)
    return str(caught.value)


def test_importing_tools_does_not_import_the_sdk() -> None:
    code = "import sys, TrainingFactory.tools.mcp.source; print([m for m in ('mcp', 'anyio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=kit.ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_tools_of_a_server(shared: MCPTools) -> None:
    assert isinstance(shared, ToolSource) and not isinstance(shared, Tool)
    tool = kit.by_name(shared)["echo"]
    assert isinstance(tool, Tool)
    assert tool.spec.description == "Say it again."
    text = {"type": "string"}  # without the titles that the SDK adds
    assert tool.spec.parameters == {"type": "object", "properties": {"text": text}, "required": ["text"]}
    assert tool.options.server == "plain" and tool.options.version.startswith("1.2 ")
    assert [spec.name for spec in shared.specs] == [tool.spec.name for tool in shared]
    assert run(shared, "echo", text="hello") == ToolResult("hello")


def test_one_connection_serves_many_event_loops_at_once(shared: MCPTools) -> None:
    async def many() -> list[ToolResult]:
        tool = kit.by_name(shared)["echo"]
        return await asyncio.gather(*(tool.run({"text": str(number)}) for number in range(50)))

    for _ in range(3):
        assert [result.content for result in asyncio.run(many())] == [str(number) for number in range(50)]
    assert run(shared, "count").content.split()[1] == run(shared, "count").content.split()[1]


def test_an_environment_takes_them_as_they_are(shared: MCPTools) -> None:
    async def play() -> list[Message]:
        environment = ToolEnvironment(Task("t", "go"), tools=[shared])
        calls = [ToolCall("echo", {"text": "hi"}, "a"), ToolCall("echo", {"txt": "hi"}, "b")]
        step = await environment.step(Message("assistant", tool_calls=calls))
        await environment.executor.close()
        return step.replies

    good, bad = asyncio.run(play())
    assert (good.content, good.tool_call_id) == ("hi", "a")
    assert "text" in bad.content and bad.tool_call_id == "b"  # refused by its schema, without a call


def test_cancelling_reaches_the_server(shared: MCPTools, tmp_path: Path) -> None:
    started = tmp_path / "started"

    async def cancel() -> None:
        arguments = {"seconds": 600, "started": str(started)}
        task = asyncio.ensure_future(kit.by_name(shared)["sleep"].run(arguments))
        await asyncio.to_thread(kit.wait_until, started.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = int(run(shared, "how_many_cancelled").content)
    asyncio.run(cancel())
    kit.wait_until(lambda: int(run(shared, "how_many_cancelled").content) == before + 1)
    (late,) = asyncio.run(
        AsyncToolExecutor([shared], timeout=3.0).batch_execute([ToolCall("sleep", {"seconds": 600})])
    )
    assert late.error == "timeout"
    kit.wait_until(lambda: int(run(shared, "how_many_cancelled").content) == before + 2)


def test_images_are_kept_and_shown_as_text(shared: MCPTools) -> None:
    result = run(shared, "picture")
    assert result.content == "[image image/png, 2 kB]"
    (image,) = result.attachments
    assert (image["type"], image["mimeType"]) == ("image", "image/png") and len(image["data"]) > 2000


def test_secrets_are_hidden_in_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", "sesame-1234")
    entry = kit.own("plain.py") | {"env": {"API": "${THE_TOKEN}", "PLACE": "/some/folder"}}
    with MCPTools.from_dict({"mcpServers": {"plain": entry}}) as tools:
        assert run(tools, "environment", name="API").content == "***"
        assert run(tools, "environment", name="PLACE").content == "/some/folder"
        assert run(tools, "environment", name="PYTHONPATH").content == ""  # not handed on


def test_secrets_are_hidden_in_attachments() -> None:
    entry = kit.own("tiny.py") | {"env": {"DB_PASS": "sesame-1234", "DB": "pg://me:hunter22@db/x"}}
    with MCPTools.from_dict({"mcpServers": {"tiny": entry}}) as tools:
        result = run(tools, "say", text="everything")
    (resource,) = result.attachments
    for shown in (result.content, resource["text"]):
        assert "sesame" not in shown and "hunter22" not in shown and "pg://me:***@db/x" in shown


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wait for a restart however slow the machine is."""
    monkeypatch.setattr(mcp_pool, "PATIENCE", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_server_that_dies_is_back_for_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    with kit.tiny() as tools:
        before = run(tools, "count").content
        result = run(tools, "die")
        assert (result.ok, result.error) == (False, "unavailable")
        assert (
            f"server 'tiny' ({PROGRAM} tiny.py)" in result.content and "the end is near" not in result.content
        )
        after = run(tools, "count")  # waits for the new process
        assert after.ok and after.content.split()[1] != before.split()[1]
    assert "the end is near" in caplog.text  # what it wrote to stderr, for the log


def test_a_server_killed_from_outside_is_noticed_without_a_call(started: Started) -> None:
    with kit.tiny() as tools:
        old = int(run(tools, "count").content.split()[1])
        os.kill(old, signal.SIGKILL)
        kit.wait_until(lambda: started() - {old})
        result = run(tools, "count")
        assert result.ok and int(result.content.split()[1]) != old


def test_a_server_that_stays_away_answers_unavailable_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_pool, "PATIENCE", 0.1)
    monkeypatch.setattr(mcp_pool, "LONGEST_PAUSE", 0.2)
    port = kit.free_port()
    process = kit.start_plain("streamable-http", port)
    with (
        kit.running(process),
        MCPTools.from_dict({"mcpServers": {"web": {"url": f"http://127.0.0.1:{port}/mcp"}}}) as tools,
    ):
        assert run(tools, "echo", text="a").ok
        in_flight = _while_it_dies(tools, process)
        assert [result.error for result in in_flight] == ["unavailable"] * 3
        down = run(tools, "echo", text="b")
        assert down.error == "unavailable" and f"127.0.0.1:{port}" in down.content
        with kit.running(kit.start_plain("streamable-http", port)):
            kit.wait_until(lambda: run(tools, "echo", text="c").ok)


def _while_it_dies(tools: MCPTools, process: subprocess.Popen[bytes]) -> list[ToolResult]:
    async def wait() -> list[ToolResult]:
        sleep = kit.by_name(tools)["sleep"]
        calls = [asyncio.ensure_future(sleep.run({"seconds": 600})) for _ in range(3)]
        await asyncio.sleep(0.5)
        process.kill()
        return await asyncio.wait_for(asyncio.gather(*calls), 60)

    return asyncio.run(wait())


@pytest.mark.usefixtures("patient")
def test_a_server_that_dies_at_every_call_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_pool, "pause", lambda failures: 0.0 if failures < 2 else 600.0)
    with kit.tiny("fragile") as tools:
        results = [run(tools, "count") for _ in range(6)]
    assert {result.error for result in results} == {"unavailable"}
    assert ["during the call" in result.content for result in results] == [True] * 2 + [False] * 4
    assert f"({PROGRAM} tiny.py) was lost: it closed the connection. It may" in results[-1].content


def test_a_hung_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_connection, "CHECK_SECONDS", 0.3)
    with kit.tiny() as tools:
        old = int(run(tools, "count").content.split()[1])
        os.kill(old, signal.SIGSTOP)
        (result,) = asyncio.run(
            AsyncToolExecutor([tools], timeout=0.3).batch_execute([ToolCall("count", {})])
        )
        assert result.error == "timeout"
        back: list[ToolResult] = []
        kit.wait_until(lambda: back.append(run(tools, "count")) or back[-1].ok)
        assert back[-1].content.split()[1] != str(old)


def test_failures_at_the_start_are_told_all_at_once() -> None:
    modes = ("exit", "hang", "noise", "nonsense", "")
    entries: dict[str, Any] = {mode or "fine": kit.own("tiny.py", mode, connect_timeout=6) for mode in modes}
    entries["hang"]["tfactory"]["connect_timeout"] = 2
    entries["exit"]["env"] = {"API_KEY": "sesame-1234"}
    entries["nobody"] = {"url": f"http://127.0.0.1:{kit.free_port()}/mcp"}
    with pytest.raises(ValueError) as caught:
        MCPTools.from_dict({"mcpServers": entries})
    told = str(caught.value)
    assert (
        f"server 'exit' ({PROGRAM} tiny.py) could not be connected: it closed the connection; it wrote:"
        in told
    )
    assert "the licence has expired with key ***" in told and "sesame" not in told
    assert f"server 'hang' ({PROGRAM} tiny.py) could not be connected: it did not answer within 2 s\n" in told
    assert "1 lines on its stdout were no MCP messages, such as 'Welcome to tiny!'" in told
    assert f"server 'nonsense' ({PROGRAM} tiny.py) could not be connected: it did not answer" in told
    assert re.search(r"server 'nobody' .*nothing answers at that address", told)
    assert "fine" not in told


def test_noise_on_stdout_does_no_harm(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with kit.tiny("chatty") as tools:
        assert run(tools, "say", text="hi").content == "hi"
    assert not caplog.text
    assert capfd.readouterr() == ("", "")  # neither the server nor the SDK wrote to the terminal


def test_schemas_that_no_argument_can_fit() -> None:
    assert "server 'tiny': tool bad: properties.x.type is no JSON schema" in wrong("schema")
    assert "refer to file:///etc/passwd, which is not in them" in wrong("outside")
    assert "leave the tool out with tfactory.tools" in wrong("schema")


def test_tools_that_are_there_twice() -> None:
    two = {"mcpServers": {"one": kit.own("tiny.py"), "my two": kit.own("tiny.py")}}
    with pytest.raises(ValueError, match=r"'one' and 'my two' both offer a tool 'say'.*\"prefix\": true"):
        MCPTools.from_dict(two)
    two["mcpServers"]["my two"] = kit.own("tiny.py", prefix=True)
    with MCPTools.from_dict(two) as tools:
        assert {"say", "my_two_say"} <= set(kit.by_name(tools))
        assert run(tools, "my_two_say", text="x").content == "x"


def test_settings_become_options() -> None:
    settings = {
        "pure": ["count"],
        "idempotent": ["die"],
        "timeout": 3,
        "concurrency": 4,
        "rate": 5,
        "retries": 1,
    }
    with kit.tiny(**settings, tools=["say", "count", "die"], prefix="t.") as tools:
        found = kit.by_name(tools)
        assert list(found) == ["t.say", "t.count", "t.die"]
        assert [tool.options.pure for tool in tools] == [False, True, False]
        assert [tool.options.idempotent for tool in tools] == [False, False, True]
        options = found["t.say"].options
        assert (options.timeout, options.concurrency, options.rate, options.retries) == (3, 4, 5, 1)
        assert not options.ordered
    assert "offers no tool 'sai'; did you mean 'say'?" in wrong("", tools=["sai"])
    assert "offers no tool 'counts'; did you mean 'count'?" in wrong("", pure=["counts"])


def test_errors_that_come_as_plain_text() -> None:
    with kit.tiny() as tools:
        assert run(tools, "fail").ok
    with kit.tiny(error_text="^Database error") as tools:
        result = run(tools, "fail")
        assert (result.ok, result.error) == (False, "exception") and "no such table" in result.content


def test_structured_answers_are_shown_and_held_to_their_schema() -> None:
    with kit.tiny() as tools:
        assert run(tools, "number") == ToolResult('{"n": 3}')
        run(tools, "say", text="from now on it is wrong")
        result = run(tools, "number")
        assert result.error == "exception" and "does not fit the server's own output schema" in result.content


def test_the_form_with_one_tool_describes_it_anew() -> None:
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 3}},
        "required": ["text"],
    }
    command = f"{sys.executable} {kit.SERVERS / 'tiny.py'}"
    given = {"name": "say", "description": "Talk.", "parameters": schema, "mcp_server": command}
    with MCPTools.from_dict([given, {"name": "count", "mcp_server": command}]) as tools:
        say, count = tools
        assert (say.spec.description, say.spec.parameters) == ("Talk.", schema)
        assert count.spec.parameters == {"type": "object", "properties": {}}
        assert run(tools, "say", text="x").content == "x"
        assert run(tools, "count").content.split()[0] == "1"  # the same server


def test_a_list_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    with kit.plain() as tools:
        before = tools.specs
        assert run(tools, "forget").content == "forgotten"
        kit.wait_until(lambda: "changed its tools" in caplog.text)
        result = run(tools, "echo", text="x")
        assert result.error == "exception" and "no longer offers echo" in result.content
        assert run(tools, "count").ok and tools.specs == before
        assert "gone: echo" in caplog.text


@pytest.mark.usefixtures("patient")
def test_a_list_that_is_another_one_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marker = tmp_path / "marker"
    with kit.tiny("other", str(marker)) as tools:
        marker.touch()
        run(tools, "die")
        assert run(tools, "say", text="x").ok
        assert run(tools, "count").error == "exception"
    assert "gone: count, die, fail, number" in caplog.text


def test_calls_are_spread_over_instances() -> None:
    async def both(tools: MCPTools) -> set[str]:
        counts = await asyncio.gather(*(kit.by_name(tools)["count"].run({}) for _ in range(8)))
        return {result.content.split()[1] for result in counts}

    with kit.plain(instances=2) as tools:
        assert len(asyncio.run(both(tools))) == 2


def test_every_episode_has_a_process_of_its_own(started: Started) -> None:
    async def episode(tools: MCPTools, text: str) -> tuple[str, str]:
        session = tools.session()
        say, count = session.tools[:2]
        assert say.options.ordered
        await say.run({"text": text})
        said = await say.run({"text": text})
        pid = (await count.run({})).content.split()[1]
        await session.close()
        return said.content, pid

    async def many(tools: MCPTools) -> list[tuple[str, str]]:
        return await asyncio.gather(*(episode(tools, text) for text in "abcdef"))

    with kit.tiny(isolation="process", instances=2, max=3) as tools:
        outcomes = asyncio.run(many(tools)) + asyncio.run(many(tools))
        assert [said for said, _ in outcomes] == [f"{text},{text}" for text in "abcdef"] * 2
        assert len({pid for _, pid in outcomes}) == 12
        kit.wait_until(lambda: len(started()) == 2)  # those that are kept ready


def test_an_own_process_that_dies_ends_the_episode_and_no_other() -> None:
    async def play(tools: MCPTools) -> None:
        one, other = tools.session(), tools.session()
        tool = {tool.spec.name: tool for tool in one.tools}
        assert (await tool["say"].run({"text": "x"})).ok
        with pytest.raises(ToolFailure, match="the session of this episode ended: server 'tiny'"):
            await tool["die"].run({})
        with pytest.raises(ToolFailure):
            await tool["say"].run({"text": "y"})
        assert (await other.tools[0].run({"text": "z"})).content == "z"
        await one.close()
        await other.close()

    with kit.tiny(isolation="session") as tools:
        asyncio.run(play(tools))


def test_episodes_that_cannot_get_a_process_go_on_without() -> None:
    async def call(tools: MCPTools) -> ToolResult:
        session = tools.session()
        try:
            return await session.tools[0].run({"text": "x"})
        finally:
            await session.close()

    async def waiting(tools: MCPTools) -> None:
        first, second = tools.session(), tools.session()
        assert (await first.tools[0].run({"text": "x"})).ok
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.tools[0].run({"text": "x"}), 0.3)  # all are in use
        await first.close()
        assert (await asyncio.wait_for(second.tools[0].run({"text": "y"}), 60)).content == "y"
        await second.close()

    with kit.tiny(isolation="session", max=1) as tools:
        asyncio.run(waiting(tools))
        kit.wait_until(lambda: len(tools.server("tiny")[1]._ready) == 1)
        config = tools.configs["tiny"]
        object.__setattr__(
            config, "args", (str(kit.SERVERS / "tiny.py"), "exit")
        )  # from now on it cannot start
        assert asyncio.run(call(tools)).ok  # the one that was ready
        kit.wait_until(lambda: asyncio.run(call(tools)).error == "unavailable")


async def say(tools: MCPTools, timeout: float, runtime: ToolRuntime) -> ToolResult:
    """One episode."""
    executor = AsyncToolExecutor([tools], timeout=timeout)
    executor.attach(runtime, "one of many")
    try:
        return (await executor.batch_execute([ToolCall("say", {"text": "x"})]))[0]
    finally:
        await executor.close()


def test_waiting_for_a_session_is_no_time_out_and_no_failure_of_the_server() -> None:
    async def play(tools: MCPTools) -> None:
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

    with kit.tiny(isolation="session", max=1) as tools:
        asyncio.run(play(tools))


@pytest.mark.parametrize("isolation", ["shared", "process"])
def test_the_start_of_a_server_is_not_in_the_time_out_of_a_call(isolation: str) -> None:
    with kit.tiny() as tools:
        listing = tools.listing()
    entry = kit.own("tiny.py", "slow", isolation=isolation)  # longer than the time-out
    with MCPTools.from_dict({"mcpServers": {"tiny": entry}}, listing=listing) as tools:
        assert asyncio.run(say(tools, 3.0, ToolRuntime())).content == "x"


def test_sessions_over_http(caplog: pytest.LogCaptureFixture) -> None:
    port = kit.free_port()
    url = f"http://127.0.0.1:{port}/mcp?key=sesame"
    entry = {"url": url, "tfactory": {"isolation": "session"}}

    async def play(tools: MCPTools) -> None:
        one, other = tools.session(), tools.session()
        assert (await one.tools[0].run({"text": "x"})).content == "x"
        assert (await other.tools[0].run({"text": "y"})).content == "y"
        await one.close()
        await other.close()

    caplog.set_level(logging.DEBUG)
    with (
        kit.running(kit.start_plain("streamable-http", port)),
        MCPTools.from_dict({"mcpServers": {"web": entry}}) as tools,
    ):
        asyncio.run(play(tools))
    assert "sesame" not in caplog.text


@pytest.mark.usefixtures("patient")
def test_nothing_leaks_when_connections_come_and_go(shared: MCPTools) -> None:
    def held() -> tuple[int, int]:
        loop = shared.server("plain")[0].loop
        return psutil.Process().num_fds(), len(asyncio.all_tasks(loop))

    async def many(tools: MCPTools) -> None:
        for _ in range(5):
            session = tools.session()
            await session.tools[0].run({"text": "x"})
            await session.close()

    run(shared, "echo", text="x")
    before = held()
    with kit.tiny() as tools, kit.tiny(isolation="process") as own:
        for _ in range(3):
            run(tools, "die")
            assert run(tools, "count").ok
        asyncio.run(many(own))
    kit.wait_until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def test_closing_is_final_and_harmless_twice() -> None:
    tools = kit.tiny()
    tools.close()
    tools.close()
    with pytest.raises(ToolFailure, match="are closed"):
        run(tools, "count")


def test_a_server_that_will_not_go_is_made_to(started: Started) -> None:
    with kit.tiny("stubborn") as tools:
        assert run(tools, "count").ok
    assert not started()


def test_a_forgotten_close_leaves_nothing_and_does_not_hang(tmp_path: Path) -> None:
    code = (
        "import asyncio\nfrom tests import mcp_kit as kit\n"
        "tools = kit.tiny(); own = kit.tiny(isolation='process', instances=2)\n"
        "print(asyncio.run(kit.by_name(tools)['count'].run({})).content, *kit.children())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=kit.ROOT, timeout=120
    )
    assert done.returncode == 0 and done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()[1:]]
    assert len(pids) >= 2
    kit.wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_starts_servers_of_its_own() -> None:
    code = (
        "import asyncio, os, sys\nfrom tests import mcp_kit as kit\n"
        "tools = kit.tiny()\n"
        "def pid(): return asyncio.run(kit.by_name(tools)['count'].run({})).content.split()[1]\n"
        "mine = pid()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0 if pid() != mine else 3)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "print(status, pid() == mine)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=kit.ROOT, timeout=120
    )
    assert done.stdout.split() == ["0", "True"], done.stderr


def test_a_listing_starts_nothing_until_a_call(started: Started) -> None:
    with kit.tiny(isolation="process") as tools:
        listing = tools.listing()
    assert not started()
    entry = kit.own("tiny.py", isolation="process")
    with MCPTools.from_dict({"mcpServers": {"tiny": entry}}, listing=listing) as tools:
        assert not started()
        assert [spec.name for spec in tools.specs] == ["say", "count", "die", "fail", "number"]
        assert run(tools, "say", text="x").content == "x"


def test_what_the_sdk_logs_for_others_still_reaches_them(
    shared: MCPTools, caplog: pytest.LogCaptureFixture
) -> None:
    run(shared, "echo", text="x")
    logging.getLogger("mcp.client.stdio").warning("from somebody else")
    assert "from somebody else" in caplog.text
