"""The MCP server of benchmarks.tools: over stdio, with a tool that answers at once and one that takes its time."""

import asyncio

from mcp.server.mcpserver import MCPServer

server = MCPServer("bench")


@server.tool()
async def echo(index: int) -> str:
    """Answer at once."""
    return f"answer {index}"


@server.tool()
async def served(index: int) -> str:
    """Answer after a while."""
    await asyncio.sleep(0.2)
    return f"answer {index}"


if __name__ == "__main__":
    server.run()
