"""Who lives where, over MCP. In the folder HOMES_FOLDER its process id is in `pid`; while there is a file `hold`, calls
get no answer, and a file `held` says that one waits: for tests that kill it in the middle of a call."""

import asyncio
import os
from pathlib import Path

from mcp.server.mcpserver import MCPServer

from TrainingFactory.models.words import NAMES, PLACES

FOLDER = Path(os.environ.get("HOMES_FOLDER", "."))
HOMES = {name: PLACES[number % len(PLACES)] for number, name in enumerate(NAMES)}
server = MCPServer("homes")


@server.tool()
async def lookup(name: str) -> str:
    """Where somebody lives."""
    if (FOLDER / "hold").exists():
        (FOLDER / "held").touch()
        await asyncio.sleep(600)
    return HOMES.get(name, "unknown")


if __name__ == "__main__":
    (FOLDER / "pid").write_text(str(os.getpid()))
    server.run()
