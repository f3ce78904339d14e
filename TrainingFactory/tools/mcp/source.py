"""Tools from MCP servers: `MCPTools.load_from_config("mcp.json")` is all that a run needs."""

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
from TrainingFactory.tools.mcp.servers import Binding, EpisodeServer, SharedServer
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import ToolResult, ToolSpec

AnyServer = SharedServer | EpisodeServer


class MCPTools:
    """Gives the tools of all servers of a config, and those of the catalog that it names (`named`); goes into
    `GRPOTrainer(tools=...)` as it is.

    `open` and `close` belong to the running event loop: on another one, or after `close`, the servers are started again
    when they are needed.
    """

    def __init__(
        self, servers: Sequence[ServerConfig], named: Mapping[str, Tool | ToolSource] | None = None
    ) -> None:
        self.configs = {config.name: config for config in servers}
        self.named = dict(named or {})
        self._offers: list[Offer] | None = None
        self._servers: dict[asyncio.AbstractEventLoop, dict[str, AnyServer]] = {}

    @classmethod
    def load_from_config(cls, path: str | Path) -> MCPTools:
        """Read a file in any of the forms that docs/TOOLS.md lists."""
        servers, names = read_config(path)
        return cls(servers, {name: make_tool(name) for name in names})

    @classmethod
    def from_dict(cls, data: Any, *, folder: str | Path = ".") -> MCPTools:
        """Do the same for a config that is in memory."""
        return cls(parse_config(data, "the given config", Path(folder).resolve()))

    @property
    def offers(self) -> list[Offer]:
        if self._offers is None:
            raise ValueError(
                f"the servers {', '.join(self.configs)} were not asked for their tools yet: await open()"
            )
        return self._offers

    @property
    def specs(self) -> list[ToolSpec]:
        return [offer.spec for offer in self.offers]

    def __repr__(self) -> str:
        return f"<MCPTools {', '.join([*self.configs, *self.named])}>"

    async def __aenter__(self) -> MCPTools:
        await self.open()
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect to all servers and learn what they offer; raise ValueError with all that failed."""
        try:
            await self._connect()
            await asyncio.gather(*(source.open() for source in self._sources()))
            if self._offers is None:
                servers = self.here().values()
                self._offers = [offer for each in servers for offer in make_offers(each.config, each.offered)]
                session = self.session()
                self._offers += [
                    Offer("", tool.spec.name, tool.spec, getattr(tool, "options", ToolOptions()))
                    for tool in session.named
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
                older = server.config.transport == "http"
                hint = '\n  (if it speaks the older SSE transport, write "type": "sse")' if older else ""
                problems.append(f"{server.config.origin}: {error}{hint}")

        await asyncio.gather(*map(connect, self.here().values()))
        if problems:
            raise ValueError("\n".join(problems))

    async def close(self) -> None:
        """End all connections and processes of the running loop."""
        servers = self._servers.pop(asyncio.get_running_loop(), {})
        await asyncio.gather(*(each.close() for each in (*servers.values(), *self._sources())))

    def _sources(self) -> list[ToolSource]:
        return [tool for tool in self.named.values() if isinstance(tool, ToolSource)]

    def session(self) -> MCPSession:
        return MCPSession(self)

    def here(self) -> dict[str, AnyServer]:
        """Return the servers of the running loop. Each loop has its own: a connection cannot change over."""
        loop = asyncio.get_running_loop()
        if loop not in self._servers:
            self._servers = {each: servers for each, servers in self._servers.items() if not each.is_closed()}
            self._servers[loop] = {
                name: (SharedServer if config.settings.isolation == "shared" else EpisodeServer)(config)
                for name, config in self.configs.items()
            }
        return self._servers[loop]


class MCPSession:
    """The tools of one episode. Servers with isolation give it connections of its own, at the first call."""

    def __init__(self, source: MCPTools) -> None:
        self._source = source
        self._bindings: dict[str, Binding] = {}
        self._sessions = [each.session() for each in source._sources()]
        self.named = [tool for tool in source.named.values() if not isinstance(tool, ToolSource)]
        self.named += [tool for session in self._sessions for tool in session.tools]
        self.tools = [*(MCPTool(offer, self) for offer in source.offers if offer.server), *self.named]

    def connections(self, name: str) -> SharedServer | Binding:
        """Return what makes the calls of this episode to a server."""
        if name not in self._bindings:
            server = self._source.here()[name]
            if isinstance(server, SharedServer):
                return server
            self._bindings[name] = Binding(server)
        return self._bindings[name]

    async def close(self) -> None:
        while self._bindings:
            self._bindings.popitem()[1].release()
        await asyncio.gather(*(session.close() for session in self._sessions))


class MCPTool:
    """One tool of one server, for one episode."""

    def __init__(self, offer: Offer, session: MCPSession) -> None:
        self.spec = offer.spec
        self.options = offer.options
        self._remote_name = offer.remote_name
        self._session = session

    async def until_ready(self) -> None:
        """Wait for the start of a server or for a session of the episode's own; the clock of a call starts after it."""
        await self._session.connections(self.options.server).until_ready()

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await self._session.connections(self.options.server).call(self._remote_name, arguments)
