"""Connection management for MCP servers: shared connections that reconnect, or one connection per episode. A server
belongs to the event loop on which it was created."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from TrainingFactory.common.texts import escape_control
from TrainingFactory.tools.mcp.offers import OfferedTool
from TrainingFactory.tools.mcp.server_config import ServerConfig, ServerDown
from TrainingFactory.types import ToolFailure, ToolResult

if TYPE_CHECKING:
    from TrainingFactory.tools.mcp.connection import Connection

log = logging.getLogger(__name__)
FIRST_PAUSE = 0.5  # seconds before the second attempt to connect; doubles with every further attempt
LONGEST_PAUSE = 30.0
PATIENCE = 5.0  # seconds that calls wait for a reconnection, which is enough for most servers
# Limited, because too many processes that start together slow each other down until all time out.
STARTS_AT_ONCE = max(4, 2 * (os.cpu_count() or 1))


def backoff_seconds(failures: int) -> float:
    """Return the seconds to wait after `failures` consecutive failures, with jitter to spread reconnections."""
    if failures == 0:
        return 0.0
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


class Server:
    """One server of a config. It keeps the first tool list, which the prompts of the run contain: later changes are
    logged, and calls of removed tools return an error."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.offered: list[OfferedTool] = []
        self._removed: set[str] = set()
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()  # strong references: the event loop keeps only weak ones

    async def connect(self) -> Connection:
        from TrainingFactory.tools.mcp.connection import Connection

        connection = Connection(self.config, self._on_tools)
        async with self._starts:
            await connection.open()
        return connection

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a background task; `close` waits for it."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_tools(self, tools: list[OfferedTool]) -> None:
        self.offered = self.offered or tools
        removed = {tool.name for tool in self.offered} - {tool.name for tool in tools}
        if removed != self._removed:
            names = escape_control(", ".join(sorted(removed))) or "none"
            text = "server %r changed its tools; this run keeps the tool list of its start (removed: %s)"
            log.warning(text, self.config.name, names)
        self._removed = removed

    def gone(self, tool: str) -> ToolResult | None:
        """Return an error result if the server has removed the tool; None otherwise."""
        if tool not in self._removed:
            return None
        text = f"server {self.config.name!r} no longer offers {tool}"
        return ToolResult(text, ok=False, error="exception")  # not "unavailable": the server is up

    def unavailable(self, error: Exception) -> ToolResult:
        log.info("%s", error)
        summary = str(error).split("; ", 1)[0].splitlines()[0]  # the server's output is only logged
        return ToolResult(f"{summary}. It may come back later.", ok=False, error="unavailable")


class SharedConnection:
    """One shared connection, with a task that reconnects it. Calls wait for `settled`: until the first attempt to
    connect has ended, and after a loss until the reconnection, for at most `PATIENCE` seconds."""

    def __init__(self, server: SharedServer) -> None:
        self.server = server
        self.connection: Connection | None = None
        self.problem = ServerDown(f"server {server.config.name!r} is not available")  # the latest error
        self.settled = asyncio.Event()
        self.task = asyncio.create_task(self._keep_connected())

    @property
    def up(self) -> Connection | None:
        """Return the connection unless it is lost."""
        connection = self.connection
        return None if connection is None or connection.lost.done() else connection

    async def _keep_connected(self) -> None:
        failures, was_up = 0, False
        try:
            while True:
                await asyncio.sleep(backoff_seconds(failures))
                try:
                    self.connection = await self.server.connect()
                except ServerDown as error:
                    log.info("%s", error)
                    failures, self.problem = failures + 1, error
                    if not was_up:
                        self.settled.set()
                    continue
                if was_up:
                    log.warning("server %r is connected again", self.server.config.name)
                was_up, connection = True, self.connection
                self.settled.set()
                await asyncio.wait({connection.lost})
                self.connection, self.problem = None, connection.down()
                log.warning("%s", self.problem)
                # Calls do not wait for a server that keeps failing before it has answered a call.
                failures = 0 if connection.served else failures + 1
                if failures < 2:
                    self.settled.clear()
                    asyncio.get_running_loop().call_later(PATIENCE, self.settled.set)
                self.server.start(connection.close())
        finally:
            self.settled.set()
            if self.connection is not None:
                await self.connection.close()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


class SharedServer(Server):
    """A server whose connections are shared by all episodes; a call goes to the least busy one."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._lines = [SharedConnection(self) for _ in range(config.settings.instances)]

    async def open(self) -> None:
        """Wait for all connections; raise ServerDown if one fails."""
        for line in self._lines:
            await line.settled.wait()
            if line.connection is None:
                raise line.problem

    async def until_ready(self) -> None:
        """Wait until a connection is up, or until waiting is pointless."""
        if any(line.up for line in self._lines):
            return
        while any(line.connection is not None for line in self._lines):
            await asyncio.sleep(0)  # let their tasks notice the loss
        await self._lines[0].settled.wait()

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        problem = None
        for _ in range(2):
            await self.until_ready()
            up = [connection for line in self._lines if (connection := line.up)]
            if not up:
                break
            connection = min(up, key=lambda connection: connection.busy)
            try:
                return self.gone(tool) or await connection.call(tool, arguments)
            except ServerDown as error:
                problem = error
                # A call that never reached the server may be sent again, even if the tool is not idempotent.
                if error.sent:
                    break
        return self.unavailable(problem or self._lines[0].problem)

    async def close(self) -> None:
        await asyncio.gather(*(line.close() for line in self._lines))
        await asyncio.gather(*self._tasks)


class EpisodeServer(Server):
    """A server with a private connection for every episode, closed after the episode. `instances` connections are
    started ahead of episodes; at most `max` exist, and further episodes wait in order."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._slots = asyncio.Semaphore(config.settings.max)  # held from the start of a connection to its end
        self._spares: deque[asyncio.Task[Connection]] = deque()  # started ahead, not in use
        self._alive: set[asyncio.Task[Connection]] = set()

    async def open(self) -> None:
        """Start the spare connections; raise ServerDown if the first one fails."""
        self._start_spares()
        if not self.offered:
            await asyncio.shield(self._spares[0])

    def take(self) -> asyncio.Task[Connection]:
        """Return a connection, ready or starting. Pass it to `give_back` in the end."""
        while True:
            self._start_spares()
            connecting = self._spares.popleft()
            if not connecting.done() or not connecting.result().lost.done():
                break
            self.give_back(connecting)  # it was lost before its first use
        self._start_spares()
        return connecting

    def give_back(self, connecting: asyncio.Task[Connection]) -> None:
        """Close the connection in the background; it is not reused, because an episode has changed its state."""
        self.start(self._end(connecting))

    async def close(self) -> None:
        self._spares.clear()
        for connecting in self._alive:
            self.give_back(connecting)
        await asyncio.gather(*self._tasks)

    def _start_spares(self) -> None:
        while len(self._spares) < self.config.settings.instances:
            connecting = asyncio.create_task(self._connect_in_slot())
            self._alive.add(connecting)
            self._spares.append(connecting)
            connecting.add_done_callback(self._discard_failed)

    async def _connect_in_slot(self) -> Connection:
        await self._slots.acquire()
        try:
            return await self.connect()
        except BaseException:
            self._slots.release()
            raise

    def _discard_failed(self, connecting: asyncio.Task[Connection]) -> None:
        if not connecting.cancelled() and connecting.exception() is None:
            return
        self._alive.discard(connecting)
        if connecting in self._spares and not connecting.cancelled():
            self._spares.remove(connecting)
            log.warning("%s", connecting.exception())

    async def _end(self, connecting: asyncio.Task[Connection]) -> None:
        connecting.cancel()  # has no effect after the start
        await asyncio.wait({connecting})
        if connecting in self._alive:
            self._alive.discard(connecting)
            await connecting.result().close()
            self._slots.release()


class EpisodeConnection:
    """The private connection of one episode to one server, acquired at the first call."""

    def __init__(self, server: EpisodeServer) -> None:
        self.server = server
        self._connecting: asyncio.Task[Connection] | None = None

    async def until_ready(self) -> None:
        """Wait until the connection is up or has failed."""
        self._connecting = self._connecting or self.server.take()
        await asyncio.wait({self._connecting})

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        if removed := self.server.gone(tool):
            return removed
        self._connecting = self._connecting or self.server.take()
        try:
            connection = await asyncio.shield(self._connecting)
        except ServerDown as error:  # the episode has no state on the server yet, so it can continue without
            self._connecting = None
            return self.server.unavailable(error)
        try:
            return await connection.call(tool, arguments)
        except ServerDown as error:
            # The episode's state on the server is lost; a new connection would silently start from scratch.
            raise ToolFailure(f"the session of this episode ended: {error}") from error

    def release(self) -> None:
        if self._connecting is not None:
            self.server.give_back(self._connecting)
            self._connecting = None
