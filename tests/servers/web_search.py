"""A search over MCP with one tool: `web_search.py PORT`."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("search")


@server.tool()
async def web_search(query: str) -> str:
    """Find pages."""
    return f"nothing about {query}"


if __name__ == "__main__":
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
