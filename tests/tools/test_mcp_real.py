"""Servers that others wrote: from npm over all three transports, and from PyPI in an environment of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.kits import mcp as kit
from TrainingFactory.tools import AsyncToolExecutor, MCPTools
from TrainingFactory.types import ToolCall, ToolResult

pytestmark = pytest.mark.anyio
TRANSPORTS = ("stdio", "streamableHttp", "sse")


@pytest.fixture(scope="module", params=TRANSPORTS)
async def everything(request: pytest.FixtureRequest) -> AsyncIterator[MCPTools]:
    program, transport = str(kit.NODE / "mcp-server-everything"), request.param
    async with AsyncExitStack() as stack:
        entry: dict[str, Any] = {"command": program, "args": ["stdio"]}
        if transport != "stdio":
            port = kit.free_port()
            process = kit.start_server([program, transport], port, PORT=str(port))
            stack.enter_context(kit.running(process))
            entry = {"url": f"http://127.0.0.1:{port}/{'mcp' if transport == 'streamableHttp' else 'sse'}"}
        yield await stack.enter_async_context(MCPTools.from_dict({"mcpServers": {"everything": entry}}))


async def execute(tools: MCPTools, *calls: ToolCall, timeout: float = 30.0) -> list[ToolResult]:
    executor = AsyncToolExecutor([tools], timeout=timeout)
    try:
        return await executor.batch_execute(calls)
    finally:
        await executor.close()


@kit.needs_node
async def test_everything(everything: MCPTools) -> None:
    assert {"echo", "get-sum", "get-tiny-image"} <= set(kit.by_name(everything))
    calls = [ToolCall("get-sum", {"a": n, "b": 1}, str(n)) for n in range(20)]
    results = await execute(everything, *calls, ToolCall("echo", {"message": "<tool_call>"}))
    assert [f"is {n + 1}." in results[n].content for n in range(20)] == [True] * 20
    assert results[-1].content == "Echo: <tool_call>"
    (refused,) = await execute(everything, ToolCall("get-sum", {"a": "x", "b": 1}))
    assert refused.error == "schema" and "`a` must be number" in refused.content


@kit.needs_node
async def test_everything_that_is_no_text(everything: MCPTools) -> None:
    image, link, resource, structured = await execute(
        everything,
        ToolCall("get-tiny-image", {}),
        ToolCall("get-resource-links", {"count": 2}),
        ToolCall("get-resource-reference", {"resourceType": "Text", "resourceId": 1}),
        ToolCall("get-structured-content", {"location": "Chicago"}),
    )
    # The checksum of one chunk of its file is wrong.
    assert "[image not shown: the data is not a valid image" in image.content and image.attachments[0]["data"]
    assert len(link.attachments) == 2 and link.attachments[0]["uri"] in link.content
    assert resource.attachments[0]["text"] in resource.content
    assert '"temperature"' in structured.content


@kit.needs_node
async def test_a_slow_call_of_everything_is_cut_off(everything: MCPTools) -> None:
    slow = ToolCall("trigger-long-running-operation", {"duration": 600, "steps": 2})
    (result,) = await execute(everything, slow, timeout=0.3)
    assert result.error == "timeout"
    assert (await execute(everything, ToolCall("echo", {"message": "still here"})))[0].ok


@kit.needs_node
async def test_filesystem(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    entry = {
        "command": str(kit.NODE / "mcp-server-filesystem"),
        "args": [str(tmp_path)],
        "tfactory": {"isolation": "process", "pure": ["list_allowed_directories"], "idempotent": False},
    }
    async with MCPTools.from_dict({"mcpServers": {"files": entry}}) as tools:
        path = {"path": str(tmp_path / "a.txt")}
        write = ToolCall("write_file", {"path": str(tmp_path / "b.txt"), "content": "new"})
        read, written, outside = await execute(
            tools,
            ToolCall("read_text_file", path),
            write,
            ToolCall("read_text_file", {"path": "/etc/hostname"}),
        )
        assert read.content == "hello" and written.ok and (tmp_path / "b.txt").read_text() == "new"
        assert outside.error == "exception" and "Access denied" in outside.content
        assert not kit.by_name(tools)["write_file"].options.idempotent
        assert kit.by_name(tools)["list_allowed_directories"].options.pure


@kit.needs_pypi
async def test_a_server_from_pypi_with_an_older_sdk() -> None:
    entry = {"command": str(kit.PYTHON / "mcp-server-calculator"), "tfactory": {"pure": True}}
    async with MCPTools.from_dict({"mcpServers": {"calculator": entry}}) as tools:
        good, bad = await execute(
            tools,
            ToolCall("calculate", {"expression": "6 * (3 + 4)"}),
            ToolCall("calculate", {"expression": "import os"}),
        )
        assert good.content == "42" and not bad.ok
        assert kit.by_name(tools)["calculate"].options.pure
