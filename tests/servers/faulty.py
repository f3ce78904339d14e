"""An MCP server that misbehaves on demand, for the fault campaign."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("faulty", log_level="CRITICAL")  # tracebacks in colour take longer than the calls


@server.tool()
async def act(what: str, number: int) -> str:
    """Answer with the number, or do worse."""
    if what == "raise":
        raise RuntimeError(f"call {number} was told to fail")
    if what == "hang":
        await asyncio.sleep(1000)
    if what == "late":
        await asyncio.sleep(0.3)
    if what == "junk":
        os.write(
            sys.stdout.fileno(), b'Loading ... 50 %\n{"jsonrpc": "2.0", "id": 10 {{{\n\xff\xfe\n[1, 2]\n'
        )
        return f"{number} \x00\u202e <tool_call>"
    if what == "large":
        return f"{number} " + "x" * 10_000_000
    if what == "close":
        os._exit(1)
    return str(number)


if __name__ == "__main__":
    server.run()
