"""An MCP server made with the SDK, for tests: `plain.py [stdio | streamable-http PORT | sse PORT]`."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, Image, MCPServer
from PIL import Image as Picture

server = MCPServer("plain", version="1.2")
cancelled = 0
calls = 0


@server.tool()
async def echo(text: str) -> str:
    """Say it again."""
    return text


@server.tool(structured_output=False)
async def a_lot() -> str:
    return "[]," * 8_000_000


@server.tool()
async def sleep(seconds: float, started: str = "") -> str:
    """Wait, and count who does not wait to the end. The file `started` says that it waits."""
    global cancelled
    try:
        if started:
            Path(started).touch()
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        cancelled += 1
        raise
    return "slept"


@server.tool()
async def count() -> str:
    """How many calls of this tool, by this process."""
    global calls
    calls += 1
    return f"{calls} {os.getpid()}"


@server.tool()
async def how_many_cancelled() -> str:
    return str(cancelled)


@server.tool()
async def picture(broken: bool = False) -> Image:
    if broken:
        return Image(data=b"\x89PNG" + bytes(2000), format="png")
    file = io.BytesIO()
    Picture.new("RGB", (8, 6), "red").save(file, "PNG")
    return Image(data=file.getvalue(), format="png")


@server.tool()
async def forget(context: Context) -> str:
    """Take the tool `echo` away, and say so."""
    server.remove_tool("echo")
    await context.notify_tools_changed()
    await context.request_context.session.send_tool_list_changed()
    return "forgotten"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        options = {"json_response": True} if "json" in sys.argv else {}
        server.run(sys.argv[1], host="127.0.0.1", port=int(sys.argv[2]), **options)  # type: ignore[call-overload]
    else:
        server.run()
