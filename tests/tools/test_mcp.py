"""Tools from MCP servers: what a source gives, what the config says, and connections."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits import mcp as kit
from tests.kits.mcp import Started, call
from tests.kits.pictures import picture
from tests.kits.python import make as make_python_tool
from tests.kits.waiting import until
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools import AsyncToolExecutor, MCPTools
from TrainingFactory.tools.mcp.offers import OfferedTool, make_offers
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import PlacedImage, ToolCall, ToolResult

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("started")]


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[MCPTools]:
    async with kit.plain() as tools:
        yield tools


# what a source gives


def test_importing_tools_does_not_import_the_sdk() -> None:
    code = "import sys, TrainingFactory.tools.mcp.source; print([m for m in ('mcp', 'anyio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=kit.ROOT)
    assert done.stdout.strip() == "[]", done.stderr


async def test_loading_starts_nothing(started: Started) -> None:
    tools = kit.tiny()
    assert not started()
    with pytest.raises(ValueError, match=r"servers tiny .*await open\(\)"):
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
    before = await kit.pid_of(shared)
    results = await asyncio.gather(*(call(shared, "echo", text=str(number)) for number in range(50)))
    assert [result.content for result in results] == [str(number) for number in range(50)]
    await shared.open()  # again does nothing
    assert await kit.pid_of(shared) == before


async def test_cancelling_reaches_the_server(shared: MCPTools, tmp_path: Path) -> None:
    begun = tmp_path / "started"

    async def cancelled() -> int:
        return int((await call(shared, "how_many_cancelled")).content)

    async def reached(count: int) -> bool:
        return await cancelled() == count

    before = await cancelled()
    task = asyncio.ensure_future(call(shared, "sleep", seconds=600, started=str(begun)))
    await until(begun.exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: reached(before + 1))
    executor = AsyncToolExecutor([shared], timeout=0.5)
    (late,) = await executor.batch_execute([ToolCall("sleep", {"seconds": 600})])
    assert late.error == "timeout"
    await until(lambda: reached(before + 2))


async def test_images_arrive(shared: MCPTools) -> None:
    result = await call(shared, "picture")
    assert (result.content, result.images, result.attachments) == ("", [PlacedImage(0, picture())], [])
    broken = await call(shared, "picture", broken=True)
    assert broken.content.startswith("[image not shown: ") and broken.ok and not broken.images
    (image,) = broken.attachments
    assert (image["type"], image["mimeType"]) == ("image", "image/png") and len(image["data"]) > 2000


async def test_secrets_are_hidden_in_results_and_attachments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_TOKEN", "sesame-1234")
    monkeypatch.setenv("PYTHONPATH", "/of/the/user")
    secret = {"API": "${THE_TOKEN}", "DB_PASS": "hunter-hunter", "DB": "pg://me:hunter22@db/x"}
    entry = kit.own("tiny.py") | {"env": secret | {"PLACE": "/some/folder"}}
    async with MCPTools.from_dict({"mcpServers": {"tiny": entry}}) as tools:
        result = await call(tools, "say", text="everything")  # its whole environment
    (resource,) = result.attachments
    for shown in (result.content, resource["text"]):
        assert not [
            word for word in ("sesame", "hunter", "/of/the/user") if word in shown
        ]  # the last is not handed on
        assert "pg://me:***@db/x" in shown and "/some/folder" in shown


# what the config says


@pytest.mark.parametrize(
    ("mode", "settings", "told"),
    [
        ("schema", {}, "server 'tiny': tool bad: properties.x.type is"),
        ("schema", {}, "tfactory.tools"),
        ("outside", {}, "refer to file:///etc/passwd"),
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


async def test_a_name_that_a_server_gives_twice_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = next(iter(kit.tiny().configs.values()))
    offers = make_offers(
        config, [OfferedTool("get", text, {"type": "object"}) for text in ("first", "second")]
    )
    assert [offer.spec.description for offer in offers] == ["second"]
    assert "server 'tiny' offers several tools called 'get'" in caplog.text


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
        assert result.error == "exception" and "output schema" in result.content


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


# connections


async def test_calls_are_spread_over_instances() -> None:
    async with kit.tiny(instances=2) as tools:
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
        await until(lambda: len(started()) == 2)  # those that are kept ready


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
    tools = kit.tiny("slow", isolation=isolation)  # takes longer than the time-out
    await tools.open()
    await tools.close()
    assert (await say(tools, 1.5, ToolRuntime())).content == "x"  # started again
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


FASTMCP = """
from mcp.server.fastmcp import Context, FastMCP
from mcp.server.fastmcp.exceptions import ToolError

mcp = FastMCP("LocalServer", "Says things.", host="127.0.0.1", port=9)


@mcp.tool()
def echo(text: str, times: int = 2):
    "Say it."
    if not text:
        raise ToolError("nothing to say")
    return {"said": text * times}


if __name__ == "__main__":
    mcp.run(transport="stdio")
"""


async def test_a_server_for_mcp_1_runs_unchanged_and_keeps_its_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(FASTMCP)
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    entry = {"command": sys.executable, "args": ["server.py"], "env": {"PYTHONPATH": str(tmp_path)}}
    async with MCPTools.from_dict({"mcpServers": {"local": entry}}, folder=tmp_path) as tools:
        assert '"said": "hihi"' in (await call(tools, "echo", text="hi")).content
        assert "nothing to say" in (await call(tools, "echo", text="")).content
    assert (tmp_path / "ran").exists()


async def test_a_file_may_name_tools_of_ours_beside_servers(tmp_path: Path) -> None:
    """RL-Factory's form: texts in the list of a .pydata file."""
    make_python_tool()  # skips the test where nothing isolates code
    path = tmp_path / "tools.pydata"
    path.write_text(repr(["code_interpreter", "calculator", {"mcpServers": {"tiny": kit.own("tiny.py")}}]))
    async with MCPTools.load_from_config(path) as tools:
        names = [spec.name for spec in tools.specs]
        assert {"python", "calculator"} < set(names) and len(names) > 2
        assert sorted(tool.spec.name for tool in tools.session().tools) == sorted(names)
        assert (await call(tools, "calculator", expression="6 * 7")).content == "42"
        assert (await call(tools, "python", code="print(6 * 7)")).content.strip() == "42"
    path.write_text("['calculator']")
    async with MCPTools.load_from_config(path) as tools:
        assert [(offer.server, offer.spec.name) for offer in tools.offers] == [("", "calculator")]
