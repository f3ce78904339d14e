"""An MCP server to try things with: `web_search` over the texts of a folder, where a real one would ask the web.

Started as `python examples/search_server.py [FOLDER]`; without a folder it searches the documentation of this
repository, or the corpus of examples/search_r1 where there is none.
"""

import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

from TrainingFactory.tools.custom_tools import SearchTool

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
DEFAULT = DOCS if (DOCS / "TOOLS.md").is_file() else HERE / "search_r1" / "corpus.jsonl"
search = SearchTool(sys.argv[1] if len(sys.argv) > 1 else DEFAULT)
server = MCPServer("search")


@server.tool()
async def web_search(query: str) -> str:
    """Search the web"""
    return (await search.run({"query": query})).content


if __name__ == "__main__":
    server.run()
