"""`MCPTools`, the tools of MCP servers: `MCPTools.load_from_config("mcp.json")`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools.making import make_tool
from TrainingFactory.tools.mcp.config import parse_config, read_config
from TrainingFactory.tools.mcp.offers import Offer, make_offers
from TrainingFactory.tools.mcp.server_config import ServerConfig, ServerDown
from TrainingFactory.tools.mcp.servers import EpisodeConnection, EpisodeServer, SharedServer
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import ToolResult, ToolSpec

AnyServer = SharedServer | EpisodeServer


class MCPTools:
    """The tools of all servers of a config and the catalog tools that it names (`named`); pass it as a trainer's
    `tools`. `open` and `close` act on the running event loop. On another loop, or after `close`, the first use
    reconnects."""

    def __init__(
        self, servers: Sequence[ServerConfig], named: Mapping[str, Tool | ToolSource] | None = None
    ) -> None:
        self.configs = {config.name: config for config in servers}
        self.named_tools = dict(named or {})
        self._offers: list[Offer] | None = None
        self._servers: dict[asyncio.AbstractEventLoop, dict[str, AnyServer]] = {}

    @classmethod
    def load_from_config(cls, path: str | Path) -> MCPTools:
        """Load a config file in any of the formats that docs/TOOLS.md lists."""
        servers, tool_names = read_config(path)
        return cls(servers, {name: make_tool(name) for name in tool_names})

    @classmethod
    def from_dict(cls, data: Any, *, folder: str | Path = ".") -> MCPTools:
        """Load a config from memory; relative paths start at `folder`."""
        return cls(parse_config(data, "the config", Path(folder).resolve()))

    @property
    def offers(self) -> list[Offer]:
        if self._offers is None:
            server_names = ", ".join(self.configs)
            raise ValueError(f"the tools of the servers {server_names} are not known yet; await open() first")
        return self._offers

    @property
    def specs(self) -> list[ToolSpec]:
        return [offer.spec for offer in self.offers]

    def __repr__(self) -> str:
        return f"<MCPTools {', '.join([*self.configs, *self.named_tools])}>"

    async def __aenter__(self) -> MCPTools:
        await self.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect to all servers and list their tools; raise ValueError with the errors of all failed servers."""
        try:
            await self._connect()
            await asyncio.gather(*(source.open() for source in self._list_sources()))
            if self._offers is None:
                servers = self.get_servers().values()
                offers_by_server = [make_offers(server.config, server.offered_tools) for server in servers]
                self._offers = [offer for offers in offers_by_server for offer in offers]
                session = self.session()
                self._offers += [
                    Offer("", tool.spec.name, tool.spec, getattr(tool, "options", ToolOptions()))
                    for tool in session.named_tools
                ]
                await session.close()
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> None:
        problems: list[str] = []

        async def connect(server: AnyServer) -> None:
            try:
                await server.open()
            except ServerDown as error:
                is_http = server.config.transport == "http"
                hint = '\n  (if it uses the older SSE transport, write "type": "sse")' if is_http else ""
                problems.append(f"{server.config.origin}: {error}{hint}")

        await asyncio.gather(*map(connect, self.get_servers().values()))
        if problems:
            raise ValueError("\n".join(problems))

    async def close(self) -> None:
        """Close all connections and server processes of the running event loop."""
        servers = self._servers.pop(asyncio.get_running_loop(), {})
        await asyncio.gather(*(resource.close() for resource in (*servers.values(), *self._list_sources())))

    def _list_sources(self) -> list[ToolSource]:
        return [tool for tool in self.named_tools.values() if isinstance(tool, ToolSource)]

    def session(self) -> MCPSession:
        return MCPSession(self)

    def get_servers(self) -> dict[str, AnyServer]:
        """Return the servers of the running event loop. Every loop has its own, because connections cannot move."""
        loop = asyncio.get_running_loop()
        if loop not in self._servers:
            for closed_loop in [server_loop for server_loop in self._servers if server_loop.is_closed()]:
                del self._servers[closed_loop]
            self._servers[loop] = {
                name: (SharedServer if config.settings.isolation == "shared" else EpisodeServer)(config)
                for name, config in self.configs.items()
            }
        return self._servers[loop]


class MCPSession:
    """The tools of one episode. Servers with isolation open a private connection for it at the first call."""

    def __init__(self, source: MCPTools) -> None:
        self._source = source
        self._episode_connections: dict[str, EpisodeConnection] = {}
        self._sessions = [tool_source.session() for tool_source in source._list_sources()]
        self.named_tools = [tool for tool in source.named_tools.values() if not isinstance(tool, ToolSource)]
        self.named_tools += [tool for session in self._sessions for tool in session.tools]
        self.tools = [MCPTool(offer, self) for offer in source.offers if offer.server] + self.named_tools

    def get_connection(self, server_name: str) -> SharedServer | EpisodeConnection:
        """Return the connection that carries this episode's calls to the server."""
        if server_name not in self._episode_connections:
            server = self._source.get_servers()[server_name]
            if isinstance(server, SharedServer):
                return server
            self._episode_connections[server_name] = EpisodeConnection(server)
        return self._episode_connections[server_name]

    async def close(self) -> None:
        while self._episode_connections:
            self._episode_connections.popitem()[1].release()
        await asyncio.gather(*(session.close() for session in self._sessions))


class MCPTool:
    """One server's tool in one episode."""

    def __init__(self, offer: Offer, session: MCPSession) -> None:
        self.spec = offer.spec
        self.options = offer.options
        self._remote_name = offer.remote_name
        self._session = session

    async def until_ready(self) -> None:
        """Wait until the server or the episode's session is ready; the time-out of a call does not cover this wait."""
        await self._session.get_connection(self.options.server).until_ready()

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await self._session.get_connection(self.options.server).call(self._remote_name, arguments)
