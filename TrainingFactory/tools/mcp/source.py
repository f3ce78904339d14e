"""Tools from MCP servers: `MCPTools.load_from_config("mcp.json")` is all that a run needs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.tools.background import Background, background, before_exit
from TrainingFactory.tools.mcp.config import ServerConfig, ToolText, parse_config, read_config
from TrainingFactory.tools.mcp.pool import Binding, EpisodeServer, SharedServer, make_server
from TrainingFactory.tools.mcp.settings import nearest
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.schema import check_schema, without_titles
from TrainingFactory.types import ToolResult, ToolSpec

if TYPE_CHECKING:
    from TrainingFactory.tools.mcp.connection import OfferedTool

log = logging.getLogger(__name__)
CLOSE_SECONDS = 20.0
_open: weakref.WeakSet[MCPTools] = weakref.WeakSet()


@dataclass(slots=True)
class Offer:
    """One tool as it is offered to models: fixed for the life of its `MCPTools`."""

    server: str
    remote_name: str  # what its server calls it
    spec: ToolSpec
    options: ToolOptions


class MCPTool:
    """One tool of one server. Runs on any event loop: the call hops to the loop that has the connection."""

    def __init__(self, offer: Offer, source: MCPTools, bindings: dict[str, Binding]) -> None:
        self.spec = offer.spec
        self.options = offer.options
        self.remote_name = offer.remote_name
        self._source = source
        self._bindings = bindings  # of the episode, shared by its tools

    def __repr__(self) -> str:
        return f"<tool {self.spec.name} of MCP server {self.options.server}>"

    async def until_ready(self) -> None:
        """Waits for the start of a server or for a session of the episode's own; the clock of a call starts after
        it. Where there is nothing to wait for, it is for the call to tell."""
        home, holder = self._holder()
        if not holder.is_ready:
            await home.hop(holder.until_ready())

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        home, holder = self._holder()
        return await home.hop(holder.call(self.remote_name, arguments))

    def _holder(self) -> tuple[Background, SharedServer | Binding]:
        home, server = self._source.server(self.options.server)
        if isinstance(server, EpisodeServer):
            return home, self._bindings.setdefault(server.config.name, Binding(server))
        return home, server


class MCPSession:
    """The tools of one episode. Servers with isolation give it connections of its own, at the first call."""

    def __init__(self, offers: Sequence[Offer], source: MCPTools, home: Background) -> None:
        self._bindings: dict[str, Binding] = {}
        self._home = home
        self.tools = [MCPTool(offer, source, self._bindings) for offer in offers]

    async def close(self) -> None:
        bindings = list(self._bindings.values())
        self._bindings.clear()
        if bindings:
            await self._home.hop(_release(bindings))


async def _release(bindings: list[Binding]) -> None:
    await asyncio.gather(*(binding.release() for binding in bindings))


class MCPTools:
    """The tools of all servers of a config; goes into `ToolEnvironment(task, tools=[...])` as it is.

    Servers are started and asked for their tools at once, all at the same time, so that a mistake shows before
    anything else happens. `listing` is what an earlier `listing()` gave: with it nothing is started until a tool
    is called. Closing is also done at the interpreter's end.
    """

    def __init__(
        self, servers: Sequence[ServerConfig], *, listing: list[dict[str, Any]] | None = None
    ) -> None:
        self.configs = {config.name: config for config in servers}
        self._closed = False
        self._pid = os.getpid()
        self._home = background()
        self._servers = {config.name: make_server(config, self._home) for config in servers}
        _open.add(self)
        try:
            self.offers = self._connect() if listing is None else [_read_offer(item) for item in listing]
            _check_names(self.offers, self.configs)
        except BaseException:
            self.close()
            raise
        self._want()
        self.tools: list[MCPTool] = MCPSession(self.offers, self, self._home).tools

    @classmethod
    def load_from_config(cls, path: str | Path, *, listing: list[dict[str, Any]] | None = None) -> MCPTools:
        """From a file: the `mcpServers` JSON of other programs, VS Code's `servers`, the one-tool form
        `{"name", "description", "parameters", "mcp_server"}`, a list of either, or RL-Factory's .pydata."""
        return cls(read_config(path), listing=listing)

    @classmethod
    def from_dict(
        cls, data: Any, *, folder: str | Path = ".", listing: list[dict[str, Any]] | None = None
    ) -> MCPTools:
        """The same for a config that is in memory."""
        return cls(parse_config(data, "the given config", Path(folder).resolve()), listing=listing)

    @property
    def specs(self) -> list[ToolSpec]:
        return [offer.spec for offer in self.offers]

    def __iter__(self) -> Iterator[MCPTool]:
        return iter(self.tools)

    def __len__(self) -> int:
        return len(self.tools)

    def __repr__(self) -> str:
        return f"<MCPTools {', '.join(self.configs)}: {len(self.offers)} tools>"

    def __enter__(self) -> MCPTools:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def session(self) -> MCPSession:
        return MCPSession(self.offers, self, self.server("")[0])

    def listing(self) -> list[dict[str, Any]]:
        """What is offered, as JSON."""
        return [asdict(offer) for offer in self.offers]

    def server(self, name: str) -> tuple[Background, Any]:
        """Where the connections live, and one server. In a forked process they are started anew: those of the
        parent are its own."""
        if self._pid != os.getpid():
            self._pid, self._home = os.getpid(), background()
            self._servers = {key: make_server(config, self._home) for key, config in self.configs.items()}
            self._want()
            _open.add(self)
        return self._home, self._servers.get(name)

    def close(self) -> None:
        """Ends all connections and processes; again does nothing."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        _open.discard(self)
        try:
            self._home.wait(_close(list(self._servers.values())), CLOSE_SECONDS)
        except TimeoutError:
            log.warning("not all of the servers %s ended within %g s", ", ".join(self.configs), CLOSE_SECONDS)

    def _want(self) -> None:
        for name, server in self._servers.items():
            server.wanted = {offer.remote_name for offer in self.offers if offer.server == name}

    def _connect(self) -> list[Offer]:
        problems = self._home.wait(_open_all(list(self._servers.values())))
        if problems:
            raise ValueError("\n".join(problems))
        offers = []
        for server in self._servers.values():
            assert server.offered is not None, "an open server has listed its tools"
            offers += _offers(server.config, server.offered)
        return offers


async def _open_all(servers: list[SharedServer | EpisodeServer]) -> list[str]:
    """Opens all at once; the problems of those that failed."""
    from TrainingFactory.tools.mcp.connection import ServerDown

    outcomes = await asyncio.gather(*(server.open() for server in servers), return_exceptions=True)
    problems = []
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, ServerDown):
            hint = ""
            if server.config.transport == "http":
                hint = '\n  (if it speaks the older SSE transport, write "type": "sse")'
            problems.append(f"{server.config.origin}: {outcome}{hint}")
        elif isinstance(outcome, BaseException):
            raise outcome
    return problems


async def _close(servers: list[SharedServer | EpisodeServer]) -> None:
    for outcome in await asyncio.gather(*(server.close() for server in servers), return_exceptions=True):
        if isinstance(outcome, BaseException):
            log.warning("a server did not close: %r", outcome)


def _close_all() -> None:
    for tools in list(_open):
        tools.close()


before_exit(_close_all)


def _offers(config: ServerConfig, offered: Sequence[OfferedTool]) -> list[Offer]:
    """The tools of one server that the config asks for, with its options."""
    by_name = {tool.name: tool for tool in offered}
    settings = config.settings
    texts = config.texts
    names = list(by_name)
    if texts is not None:
        names = list(texts)
    if settings.tools is not None:
        names = [name for name in names if name in settings.tools] if texts is None else names
    named = [*(texts or ()), *(settings.tools or ())]
    for option in ("pure", "stateful", "idempotent"):
        value = getattr(settings, option)
        named += value if isinstance(value, tuple) else ()
    for name in named:
        if name not in by_name:
            raise ValueError(f"{config.where} offers no tool {name!r}{nearest(name, by_name)}")
    return [_offer(config, by_name[name], (texts or {}).get(name, ToolText())) for name in names]


def _offer(config: ServerConfig, tool: OfferedTool, text: ToolText) -> Offer:
    settings = config.settings
    where = f"{config.where}: tool {tool.name!r}"
    given = without_titles(tool.parameters) if text.parameters is None else text.parameters
    prefix = settings.prefix
    if isinstance(prefix, bool):
        prefix = re.sub(r"[^A-Za-z0-9_-]", "_", config.name) + "_" if prefix else ""
    name = prefix + tool.name
    if not re.fullmatch(r"[A-Za-z0-9_./-]{1,128}", name):
        raise ValueError(
            f"{where}: its name has characters that models cannot write; leave it out with tfactory.tools"
        )
    idempotent = tool.idempotent if settings.idempotent is None else settings.marked("idempotent", tool.name)
    options = ToolOptions(
        timeout=settings.timeout,
        ordered=settings.isolation != "shared",  # the calls of a turn share the state of the session
        pure=settings.marked("pure", tool.name),
        stateful=settings.marked("stateful", tool.name),
        idempotent=idempotent,
        retries=settings.retries,
        concurrency=settings.concurrency,
        rate=settings.rate,
        server=config.name,
        version=f"{tool.version} {config.launch}".strip(),
    )
    description = tool.description if text.description is None else text.description
    spec = _spec(name, description.strip(), given, config.where)
    return Offer(config.name, tool.name, spec, options)


def _spec(name: str, description: str, parameters: dict[str, Any], where: str) -> ToolSpec:
    """Checked. `$schema` says nothing to a model, so it stays only where the schema is wrong without it."""
    given = {"type": "object", "properties": {}} | parameters
    bare = ToolSpec(name, description, {key: value for key, value in given.items() if key != "$schema"})
    try:
        check_schema(bare, where)
    except ValueError as error:
        whole = ToolSpec(name, description, given)
        with contextlib.suppress(ValueError):
            check_schema(whole, where)
            return whole
        raise ValueError(f"{error}; mend the server, or leave the tool out with tfactory.tools") from None
    return bare


def _check_names(offers: Sequence[Offer], configs: dict[str, ServerConfig]) -> None:
    owners: dict[str, str] = {}
    for offer in offers:
        other = owners.setdefault(offer.spec.name, offer.server)
        if other != offer.server:
            raise ValueError(
                f"{configs[offer.server].origin}: the servers {other!r} and {offer.server!r} both offer a tool "
                f'{offer.spec.name!r}; write "tfactory": {{"prefix": true}} in one of them'
            )


def _read_offer(item: dict[str, Any]) -> Offer:
    return Offer(
        item["server"], item["remote_name"], ToolSpec(**item["spec"]), ToolOptions(**item["options"])
    )
