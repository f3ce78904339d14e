"""What the tests of MCP share: servers to start, and processes to count."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.waiting import wait_until
from TrainingFactory.tools.mcp.source import MCPTool, MCPTools
from TrainingFactory.types import ToolResult

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ROOT / "tests" / "servers"
NODE = ROOT / ".servers" / "node" / "node_modules" / ".bin"
PYTHON = ROOT / ".servers" / "python" / "bin"

Started = Callable[[], set[int]]

needs_node = pytest.mark.skipif(
    not (NODE / "mcp-server-everything").exists() or shutil.which("node") is None,
    reason="the MCP servers from npm are not installed: make servers",
)
needs_pypi = pytest.mark.skipif(
    not (PYTHON / "mcp-server-calculator").exists(),
    reason="the MCP server from PyPI is not installed: make servers",
)


def own(script: str, *arguments: str, **settings: Any) -> dict[str, Any]:
    """The entry of one of our own servers: `tiny.py` starts at once, `plain.py` is made with the SDK."""
    return {"command": sys.executable, "args": [str(SERVERS / script), *arguments], "tfactory": settings}


def tiny(mode: str = "", *arguments: str, **settings: Any) -> MCPTools:
    return MCPTools.from_dict({"mcpServers": {"tiny": own("tiny.py", mode, *arguments, **settings)}})


def plain(**settings: Any) -> MCPTools:
    return MCPTools.from_dict({"mcpServers": {"plain": own("plain.py", **settings)}})


def by_name(tools: MCPTools) -> dict[str, MCPTool]:
    """The tools of one episode."""
    return {tool.spec.name: tool for tool in tools.session().tools}


async def call(tools: MCPTools, tool: str, /, **arguments: Any) -> ToolResult:
    """The only call of an episode."""
    session = tools.session()
    try:
        return await next(one for one in session.tools if one.spec.name == tool).run(arguments)
    finally:
        await session.close()


async def pid_of(tools: MCPTools) -> int:
    return int((await call(tools, "count")).content.split()[1])


def children() -> set[int]:
    """Processes of ours that live."""
    return {process.pid for process in psutil.Process().children(recursive=True) if lives(process)}


def lives(process: psutil.Process) -> bool:
    """Whether it is still there: one that has ended counts as gone, also where nobody has asked how."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


def start_server(command: list[str], port: int, **environment: str) -> subprocess.Popen[bytes]:
    """A server on a loopback port, waited for."""
    quiet = subprocess.DEVNULL
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin"} | environment
    if node := shutil.which("node"):
        env["PATH"] = f"{Path(node).parent}:{env['PATH']}"
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=env)
    wait_until(lambda: _listens(port) or process.poll() is not None)
    assert process.poll() is None, "the server did not start"
    return process


def start_plain(transport: str, port: int) -> subprocess.Popen[bytes]:
    return start_server([sys.executable, str(SERVERS / "plain.py"), transport, str(port)], port)


@contextlib.contextmanager
def running(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait()
