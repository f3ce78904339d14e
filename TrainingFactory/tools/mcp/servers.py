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
FIRST_PAUSE_SECONDS = 0.5  # seconds before the second attempt to connect; doubles with every further attempt
MAX_PAUSE_SECONDS = 30.0
RECONNECT_SECONDS = 5.0  # seconds that calls wait for a reconnection, which is enough for most servers
# Limited, because too many processes that start together slow each other down until all time out.
MAX_CONCURRENT_STARTS = max(4, 2 * (os.cpu_count() or 1))


def get_backoff_seconds(num_failures: int) -> float:
    """Return the seconds to wait after `failures` consecutive failures, with jitter to spread reconnections."""
    if num_failures == 0:
        return 0.0
    return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (num_failures - 1)) * random.uniform(0.5, 1.0)


class Server:
    """One server of a config. It keeps the first tool list, because the prompts of the run contain it. Later changes
    are logged, and calls of removed tools return an error."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.offered_tools: list[OfferedTool] = []
        self._removed_tool_names: set[str] = set()
        self._start_slots = asyncio.Semaphore(MAX_CONCURRENT_STARTS)
        self._background_tasks: set[asyncio.Task[Any]] = set()  # the event loop keeps only weak references

    async def connect(self) -> Connection:
        from TrainingFactory.tools.mcp.connection import Connection

        connection = Connection(self.config, self._on_tools_listed)
        async with self._start_slots:
            await connection.open()
        return connection

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a background task; `close` waits for it."""
        task = asyncio.create_task(coroutine)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)

    def _on_tools_listed(self, tools: list[OfferedTool]) -> None:
        self.offered_tools = self.offered_tools or tools
        missing_names = {tool.name for tool in self.offered_tools} - {tool.name for tool in tools}
        if missing_names != self._removed_tool_names:
            removed_list = escape_control(", ".join(sorted(missing_names))) or "none"
            text = "server %r changed its tools; this run keeps the tool list of its start (removed: %s)"
            log.warning(text, self.config.name, removed_list)
        self._removed_tool_names = missing_names

    def make_removed_result(self, tool_name: str) -> ToolResult | None:
        """Return an error result if the server has removed the tool; None otherwise."""
        if tool_name not in self._removed_tool_names:
            return None
        text = f"server {self.config.name!r} no longer offers {tool_name}"
        return ToolResult(text, ok=False, error="exception")  # not "unavailable": the server is up

    def make_unavailable_result(self, error: Exception) -> ToolResult:
        log.info("%s", error)
        summary = str(error).split("; ", 1)[0].splitlines()[0]  # the server's output is only logged
        return ToolResult(f"{summary}. It may come back later.", ok=False, error="unavailable")


class SharedConnection:
    """One shared connection, with a task that reconnects it. Calls wait for `settled_event`: until the first attempt to
    connect has ended, and after a loss until the reconnection, for at most `RECONNECT_SECONDS`."""

    def __init__(self, server: SharedServer) -> None:
        self.server = server
        self.connection: Connection | None = None
        self.last_error = ServerDown(f"server {server.config.name!r} is not available")  # the latest error
        self.settled_event = asyncio.Event()
        self.task = asyncio.create_task(self._keep_connected())

    @property
    def live_connection(self) -> Connection | None:
        """Return the connection unless it is lost."""
        connection = self.connection
        return None if connection is None or connection.lost_future.done() else connection

    async def _keep_connected(self) -> None:
        num_failures, was_connected = 0, False
        try:
            while True:
                await asyncio.sleep(get_backoff_seconds(num_failures))
                try:
                    self.connection = await self.server.connect()
                except ServerDown as error:
                    log.info("%s", error)
                    num_failures, self.last_error = num_failures + 1, error
                    if not was_connected:
                        self.settled_event.set()
                    continue
                if was_connected:
                    log.warning("server %r is connected again", self.server.config.name)
                was_connected, connection = True, self.connection
                self.settled_event.set()
                await asyncio.wait({connection.lost_future})
                self.connection, self.last_error = None, connection.make_down_error()
                log.warning("%s", self.last_error)
                # Calls do not wait for a server that keeps failing before it has answered a call.
                num_failures = 0 if connection.has_answered else num_failures + 1
                if num_failures < 2:
                    self.settled_event.clear()
                    asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self.settled_event.set)
                self.server.start_task(connection.close())
        finally:
            self.settled_event.set()
            if self.connection is not None:
                await self.connection.close()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


class SharedServer(Server):
    """A server whose connections are shared by all episodes; a call goes to the least busy one."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._connections = [SharedConnection(self) for _ in range(config.settings.instances)]

    async def open(self) -> None:
        """Wait for all connections; raise ServerDown if one fails."""
        for link in self._connections:
            await link.settled_event.wait()
            if link.connection is None:
                raise link.last_error

    async def until_ready(self) -> None:
        """Wait until a connection is up. Stop waiting when the first attempt to connect has ended, or
        `RECONNECT_SECONDS` after a loss."""
        if any(link.live_connection for link in self._connections):
            return
        while any(link.connection is not None for link in self._connections):
            await asyncio.sleep(0)  # let their tasks notice the loss
        await self._connections[0].settled_event.wait()

    async def call(self, tool_name: str, arguments: dict[str, Any]) -> ToolResult:
        last_error = None
        for _ in range(2):
            await self.until_ready()
            connections = [connection for link in self._connections if (connection := link.live_connection)]
            if not connections:
                break
            connection = min(connections, key=lambda connection: connection.num_active_calls)
            try:
                return self.make_removed_result(tool_name) or await connection.call(tool_name, arguments)
            except ServerDown as error:
                last_error = error
                # A call that never reached the server may be sent again, even if the tool is not idempotent.
                if error.was_sent:
                    break
        return self.make_unavailable_result(last_error or self._connections[0].last_error)

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._connections))
        await asyncio.gather(*self._background_tasks)


class EpisodeServer(Server):
    """A server with a private connection for every episode, closed after the episode. `instances` connections are
    started ahead of episodes; at most `max` exist, and further episodes wait in order."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._slots = asyncio.Semaphore(config.settings.max)  # held from the start of a connection to its end
        self._spare_connections: deque[asyncio.Task[Connection]] = deque()  # started ahead, not in use
        self._live_connections: set[asyncio.Task[Connection]] = set()

    async def open(self) -> None:
        """Start the spare connections; raise ServerDown if the first one fails."""
        self._start_spare_connections()
        if not self.offered_tools:
            await asyncio.shield(self._spare_connections[0])

    def take_connection(self) -> asyncio.Task[Connection]:
        """Return a ready or starting connection; the caller must pass it to `release_connection` at the end."""
        while True:
            self._start_spare_connections()
            connection = self._spare_connections.popleft()
            if not connection.done() or not connection.result().lost_future.done():
                break
            self.release_connection(connection)  # it was lost before its first use
        self._start_spare_connections()
        return connection

    def release_connection(self, connection: asyncio.Task[Connection]) -> None:
        """Close the connection in the background; it is not reused, because an episode has changed its state."""
        self.start_task(self._close_connection(connection))

    async def close(self) -> None:
        self._spare_connections.clear()
        for connection in self._live_connections:
            self.release_connection(connection)
        await asyncio.gather(*self._background_tasks)

    def _start_spare_connections(self) -> None:
        while len(self._spare_connections) < self.config.settings.instances:
            connection = asyncio.create_task(self._connect_in_slot())
            self._live_connections.add(connection)
            self._spare_connections.append(connection)
            connection.add_done_callback(self._discard_failed_connection)

    async def _connect_in_slot(self) -> Connection:
        await self._slots.acquire()
        try:
            return await self.connect()
        except BaseException:
            self._slots.release()
            raise

    def _discard_failed_connection(self, connection: asyncio.Task[Connection]) -> None:
        if not connection.cancelled() and connection.exception() is None:
            return
        self._live_connections.discard(connection)
        if connection in self._spare_connections and not connection.cancelled():
            self._spare_connections.remove(connection)
            log.warning("%s", connection.exception())

    async def _close_connection(self, connection: asyncio.Task[Connection]) -> None:
        connection.cancel()  # has no effect after the start
        await asyncio.wait({connection})
        if connection in self._live_connections:
            self._live_connections.discard(connection)
            await connection.result().close()
            self._slots.release()


class EpisodeConnection:
    """The private connection of one episode to one server, acquired at the first call."""

    def __init__(self, server: EpisodeServer) -> None:
        self.server = server
        self._connection: asyncio.Task[Connection] | None = None

    async def until_ready(self) -> None:
        """Wait until the connection is up or has failed."""
        self._connection = self._connection or self.server.take_connection()
        await asyncio.wait({self._connection})

    async def call(self, tool_name: str, arguments: dict[str, Any]) -> ToolResult:
        if removed_result := self.server.make_removed_result(tool_name):
            return removed_result
        self._connection = self._connection or self.server.take_connection()
        try:
            connection = await asyncio.shield(self._connection)
        except ServerDown as error:  # the episode has no state on the server yet, so it can continue without
            self._connection = None
            return self.server.make_unavailable_result(error)
        try:
            return await connection.call(tool_name, arguments)
        except ServerDown as error:
            # The episode's state on the server is lost; a new connection would silently start from scratch.
            raise ToolFailure(f"the session of this episode ended: {error}") from error

    def release(self) -> None:
        if self._connection is not None:
            self.server.release_connection(self._connection)
            self._connection = None
