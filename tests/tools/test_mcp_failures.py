"""MCP servers of our own that die, hang, babble and change, and how connections end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits import mcp as kit
from tests.kits.mcp import Started, call
from tests.kits.waiting import until, wait_until
from TrainingFactory.tools import AsyncToolExecutor, MCPTools
from TrainingFactory.tools.mcp import connection as mcp_connection
from TrainingFactory.tools.mcp import servers as mcp_servers
from TrainingFactory.tools.mcp import stdio
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult

PROGRAM = Path(sys.executable).name
pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("started")]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls wait for a restart however slow the machine is."""
    monkeypatch.setattr(mcp_servers, "RECONNECT_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
async def test_a_server_that_dies_is_back_for_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    async with kit.tiny() as tools:
        before = await kit.pid_of(tools)
        result = await call(tools, "die")
        assert (result.ok, result.error) == (False, "unavailable")
        assert f"server 'tiny' ({PROGRAM} tiny.py)" in result.content
        assert "the end is near" not in result.content
        assert await kit.pid_of(tools) != before  # waits for the new process
    assert "the end is near" in caplog.text  # what it wrote to stderr, for the log
    assert (
        not set("\x1b\x07\x9b\r") & set(caplog.text) and "near\\x1b]0;owned\\x07\\x9b2J\\rok" in caplog.text
    )


async def test_a_server_killed_from_outside_is_noticed_without_a_call(started: Started) -> None:
    async with kit.tiny() as tools:
        old = await kit.pid_of(tools)
        os.kill(old, signal.SIGKILL)
        await until(lambda: started() - {old})
        assert await kit.pid_of(tools) != old


async def test_a_server_that_stays_away_answers_unavailable_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_servers, "RECONNECT_SECONDS", 0.1)
    monkeypatch.setattr(mcp_servers, "MAX_PAUSE_SECONDS", 0.2)
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
                await until(answers)


@pytest.mark.usefixtures("patient")
async def test_a_server_that_dies_at_every_call_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "get_backoff_seconds", lambda failures: 0.0 if failures < 2 else 600.0)
    async with kit.tiny("fragile") as tools:
        results = [await call(tools, "count") for _ in range(6)]
    assert {result.error for result in results} == {"unavailable"}
    assert ["during the call" in result.content for result in results] == [True] * 2 + [False] * 4
    assert f"({PROGRAM} tiny.py) was lost: it closed the connection. It may" in results[-1].content


async def test_a_hung_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_connection, "HEALTH_CHECK_SECONDS", 0.3)
    async with kit.tiny() as tools:
        old = await kit.pid_of(tools)
        os.kill(old, signal.SIGSTOP)
        (result,) = await AsyncToolExecutor([tools], timeout=0.3).batch_execute([ToolCall("count", {})])
        assert result.error == "timeout"
        back: list[ToolResult] = []

        async def answers() -> bool:
            back.append(await call(tools, "count"))
            return back[-1].ok

        await until(answers)
        assert back[-1].content.split()[1] != str(old)


async def test_failures_at_the_start_are_told_all_at_once() -> None:
    modes = ("exit", "hang", "noise", "nonsense", "")
    entries: dict[str, Any] = {mode or "fine": kit.own("tiny.py", mode, connect_timeout=4) for mode in modes}
    entries["hang"]["tfactory"]["connect_timeout"] = 2
    entries["exit"]["env"] = {"API_KEY": "sesame-1234"}
    entries["nobody"] = {"url": f"http://127.0.0.1:{kit.free_port()}/mcp"}
    with pytest.raises(ValueError) as caught:
        await MCPTools.from_dict({"mcpServers": entries}).open()
    told = str(caught.value)
    for expected in (
        f"server 'exit' ({PROGRAM} tiny.py) failed to connect: it closed the connection; its stderr:",
        "the licence has expired with key ***",
        f"server 'hang' ({PROGRAM} tiny.py) failed to connect: no answer within 2 s",
        "1 lines on stdout are not MCP messages, e.g. 'Welcome to tiny!'",
        f"server 'nonsense' ({PROGRAM} tiny.py) failed to connect: no answer",
    ):
        assert expected in told
    assert re.search(r"server 'nobody' .*nothing answers", told)
    assert "fine" not in told and "sesame" not in told


async def test_noise_on_stdout_does_no_harm(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with kit.tiny("chatty") as tools:
        assert (await call(tools, "say", text="hi")).content == "hi"
    assert not caplog.text
    assert capfd.readouterr() == ("", "")  # neither the server nor the SDK wrote to the terminal


async def test_a_list_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    async with kit.plain() as tools:
        before = tools.specs
        assert (await call(tools, "forget")).content == "forgotten"
        await until(lambda: "changed its tools" in caplog.text)
        result = await call(tools, "echo", text="x")
        assert result.error == "exception" and "no longer offers echo" in result.content
        assert (await call(tools, "count")).ok and tools.specs == before
        assert "removed: echo" in caplog.text


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
    assert "removed: count, die, fail, number" in caplog.text


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
        await until(fails)
        marker.unlink()
        assert (await call(tools, "say", text="z")).content == "z"


@pytest.mark.usefixtures("patient")
async def test_nothing_leaks_when_connections_come_and_go() -> None:
    def held() -> tuple[int, int]:
        return psutil.Process().num_fds(), len(asyncio.all_tasks())

    before = held()
    async with kit.tiny() as tools, kit.tiny(isolation="process") as own:
        for _ in range(3):
            await call(tools, "die")
            assert (await call(tools, "count")).ok
        for _ in range(5):
            await call(own, "say", text="x")
    await until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


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
        return await kit.pid_of(tools)

    async def second() -> tuple[int, int]:
        here = await kit.pid_of(tools)
        elsewhere = await asyncio.to_thread(asyncio.run, kit.pid_of(tools))  # at the same time
        assert await kit.pid_of(tools) == here
        await tools.close()
        return here, elsewhere

    assert len({asyncio.run(first()), *asyncio.run(second())}) == 3
    assert not started()  # the end of a loop is the end of its servers


async def test_a_server_that_will_not_go_is_made_to(started: Started) -> None:
    async with kit.tiny("stubborn") as tools:
        assert (await call(tools, "count")).ok
    assert not started()


@pytest.mark.parametrize("mode", ["", "backwards"])
async def test_an_answer_of_absurd_size_is_an_error_of_its_call_alone(mode: str) -> None:
    async with kit.tiny(mode) as tools:
        before = await kit.pid_of(tools)
        flood, said = await asyncio.gather(call(tools, "say", text="a lot"), call(tools, "say", text="hello"))
        assert (flood.ok, flood.error) == (False, "exception") and "more than 8388608 bytes" in flood.content
        assert said.content == "hello" and await kit.pid_of(tools) == before


@pytest.mark.parametrize("form", ["json", "events"])
async def test_an_answer_of_absurd_size_over_http(form: str) -> None:
    port = kit.free_port()
    command = [sys.executable, str(kit.SERVERS / "plain.py"), "streamable-http", str(port), form]
    with kit.running(kit.start_server(command, port)):
        async with MCPTools.from_dict({"mcpServers": {"far": {"url": f"http://127.0.0.1:{port}"}}}) as tools:
            flood, said = await asyncio.gather(call(tools, "a_lot"), call(tools, "echo", text="hello"))
            assert (flood.ok, flood.error) == (False, "exception") and "8388608" in flood.content
            assert said.content == "hello" and (await call(tools, "echo", text="more")).content == "more"


async def test_what_a_server_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    look = stdio.find_offspring
    # Slow as on a busy machine: a server that sees its end before has left its children by then.
    monkeypatch.setattr(stdio, "find_offspring", lambda pid: time.sleep(0.5) or look(pid))
    async with kit.tiny() as tools:
        pids = [int(pid) for pid in (await call(tools, "say", text="children")).content.split()]
        started = [psutil.Process(pid) for pid in pids]  # not by number alone, which may soon be another's
        assert len(started) == 2 and all(map(kit.lives, started))
    await until(lambda: not any(map(kit.lives, started)))


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
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
