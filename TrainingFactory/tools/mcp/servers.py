"""The connections of one server: shared ones that come back when they are lost, or one for each episode. A server
belongs to the event loop on which it was made."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from TrainingFactory.common.texts import clean
from TrainingFactory.tools.mcp.offers import OfferedTool
from TrainingFactory.tools.mcp.server_config import ServerConfig, ServerDown
from TrainingFactory.types import ToolFailure, ToolResult

if TYPE_CHECKING:
    from TrainingFactory.tools.mcp.connection import Connection

log = logging.getLogger(__name__)
FIRST_PAUSE = 0.5  # seconds before the second attempt to connect; every further one takes twice as long
LONGEST_PAUSE = 30.0
PATIENCE = 5.0  # seconds that calls wait for a lost connection: most servers are back by then
# Processes that start at the same time slow each other down until none is ready in time.
STARTS_AT_ONCE = max(4, 2 * (os.cpu_count() or 1))


def pause(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row; random, so that not all come back at once."""
    if failures == 0:
        return 0.0
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


class Server:
    """One server of a config: opens connections, and knows what it offered first. The prompts of a run were made
    with that, so later changes are logged and tools that vanished answer so."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.offered: list[OfferedTool] = []
        self._vanished: set[str] = set()
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself keeps only weak references

    async def connect(self) -> Connection:
        from TrainingFactory.tools.mcp.connection import Connection

        connection = Connection(self.config, self._saw)
        async with self._starts:
            await connection.open()
        return connection

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a task that `close` of the server waits for."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _saw(self, tools: list[OfferedTool]) -> None:
        self.offered = self.offered or tools
        vanished = {tool.name for tool in self.offered} - {tool.name for tool in tools}
        if vanished != self._vanished:
            gone = clean(", ".join(sorted(vanished))) or "none"
            text = "server %r changed its tools; this run keeps those it began with (gone: %s)"
            log.warning(text, self.config.name, gone)
        self._vanished = vanished

    def gone(self, tool: str) -> ToolResult | None:
        """Return the answer of a tool that the server no longer has."""
        if tool not in self._vanished:
            return None
        text = f"server {self.config.name!r} no longer offers {tool}"
        return ToolResult(text, ok=False, error="exception")  # the server itself is there

    def unavailable(self, error: Exception) -> ToolResult:
        log.info("%s", error)
        brief = str(error).split("; ", 1)[0].splitlines()[0]  # the server's own words are for the log
        return ToolResult(f"{brief}. It may come back later.", ok=False, error="unavailable")


class Line:
    """One shared connection that a task keeps up. Calls wait until it is `settled`: until the first connection is made,
    or after a loss the next one, but not for longer than a model may be kept in the dark."""

    def __init__(self, server: SharedServer) -> None:
        self.server = server
        self.connection: Connection | None = None
        self.problem = ServerDown(f"server {server.config.name!r} is not available")  # why there is none
        self.settled = asyncio.Event()
        self.task = asyncio.create_task(self._keep())

    @property
    def up(self) -> Connection | None:
        connection = self.connection
        return None if connection is None or connection.lost.done() else connection

    async def _keep(self) -> None:
        failures, was_up = 0, False
        try:
            while True:
                await asyncio.sleep(pause(failures))
                try:
                    self.connection = await self.server.connect()
                except ServerDown as error:
                    log.info("%s", error)
                    failures, self.problem = failures + 1, error
                    if not was_up:
                        self.settled.set()
                    continue
                if was_up:
                    log.warning("server %r is back", self.server.config.name)
                was_up, connection = True, self.connection
                self.settled.set()
                await asyncio.wait({connection.lost})
                self.connection, self.problem = None, connection.down()
                log.warning("%s", self.problem)
                # One that dies before it has answered a single call is not worth waiting for.
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
    """All episodes use the same connections, the least busy one first."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._lines = [Line(self) for _ in range(config.settings.instances)]

    async def open(self) -> None:
        """Connect; raise ServerDown if it cannot be reached at all."""
        for line in self._lines:
            await line.settled.wait()
            if line.connection is None:
                raise line.problem

    async def until_ready(self) -> None:
        """Wait until a connection is up, or there is nothing to wait for."""
        if any(line.up for line in self._lines):
            return
        while any(line.connection is not None for line in self._lines):
            await asyncio.sleep(0)  # let the lines see that they are down
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
                # What never reached the server may be sent once more, whatever the tool does.
                if error.sent:
                    break
        return self.unavailable(problem or self._lines[0].problem)

    async def close(self) -> None:
        await asyncio.gather(*(line.close() for line in self._lines))
        await asyncio.gather(*self._tasks)


class EpisodeServer(Server):
    """Every episode takes a connection of its own, which is closed after it. `instances` are started ahead of
    episodes; at most `max` exist at once, and whoever finds no room waits in turn."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._room = asyncio.Semaphore(config.settings.max)  # taken from a connection's start to its end
        self._ahead: deque[asyncio.Task[Connection]] = deque()  # nobody's yet
        self._alive: set[asyncio.Task[Connection]] = set()

    async def open(self) -> None:
        """Start those that are kept ready; raise ServerDown if the first one cannot be."""
        self._fill()
        if not self.offered:
            await asyncio.shield(self._ahead[0])

    def take(self) -> asyncio.Task[Connection]:
        """Return a connection, ready or under way, that goes to `give_back` in the end."""
        while True:
            self._fill()
            taken = self._ahead.popleft()
            if not taken.done() or not taken.result().lost.done():
                break
            self.give_back(taken)  # it died before anybody came
        self._fill()
        return taken

    def give_back(self, taken: asyncio.Task[Connection]) -> None:
        """Close it without waiting, since an episode has used it."""
        self.start(self._end(taken))

    async def close(self) -> None:
        self._ahead.clear()
        for connection in self._alive:
            self.give_back(connection)
        await asyncio.gather(*self._tasks)

    def _fill(self) -> None:
        while len(self._ahead) < self.config.settings.instances:
            begun = asyncio.create_task(self._in_turn())
            self._alive.add(begun)
            self._ahead.append(begun)
            begun.add_done_callback(self._check)

    async def _in_turn(self) -> Connection:
        await self._room.acquire()
        try:
            return await self.connect()
        except BaseException:
            self._room.release()
            raise

    def _check(self, begun: asyncio.Task[Connection]) -> None:
        """Forget one that could not be started."""
        if not begun.cancelled() and begun.exception() is None:
            return
        self._alive.discard(begun)
        if begun in self._ahead and not begun.cancelled():
            self._ahead.remove(begun)
            log.warning("%s", begun.exception())

    async def _end(self, taken: asyncio.Task[Connection]) -> None:
        taken.cancel()  # does nothing to one that has started
        await asyncio.wait({taken})
        if taken in self._alive:
            self._alive.discard(taken)
            await taken.result().close()
            self._room.release()


class Binding:
    """The side of one episode: its own connection to one server, taken at the first call."""

    def __init__(self, server: EpisodeServer) -> None:
        self.server = server
        self._taken: asyncio.Task[Connection] | None = None

    async def until_ready(self) -> None:
        """Wait until it is known whether there is a connection."""
        self._taken = self._taken or self.server.take()
        await asyncio.wait({self._taken})

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        if gone := self.server.gone(tool):
            return gone
        self._taken = self._taken or self.server.take()
        try:
            connection = await asyncio.shield(self._taken)
        except ServerDown as error:  # nothing has happened yet in this episode: it may go on without
            self._taken = None
            return self.server.unavailable(error)
        try:
            return await connection.call(tool, arguments)
        except ServerDown as error:
            # What the episode did there is lost; going on with a fresh server would be a lie.
            raise ToolFailure(f"the session of this episode ended: {error}") from error

    def release(self) -> None:
        if self._taken is not None:
            self.server.give_back(self._taken)
            self._taken = None
