"""The connections of one server: shared ones that come back when they are lost, or one for each episode.

Everything here runs on the background loop, so there are no locks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import deque
from typing import TYPE_CHECKING, Any

from TrainingFactory.tools.background import Background
from TrainingFactory.tools.mcp.config import ServerConfig
from TrainingFactory.types import ToolFailure, ToolResult

if TYPE_CHECKING:
    from TrainingFactory.tools.mcp.connection import Connection, OfferedTool

log = logging.getLogger(__name__)
FIRST_PAUSE = 0.5  # seconds before the second attempt to connect; every further one takes twice as long
LONGEST_PAUSE = 30.0
PATIENCE = 5.0  # seconds that calls wait for a lost connection: most servers are back by then
# Processes that start at the same time slow each other down until none is ready in time.
STARTS_AT_ONCE = max(4, 2 * (os.cpu_count() or 1))
_starts: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


def pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row; random, so that not all come back at once."""
    if failures == 0:
        return 0.0
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


class Server:
    """One server of a config: opens connections, and knows what it offered first. The prompts of a run were made
    with that, so later changes are logged and tools that vanished answer so."""

    def __init__(self, config: ServerConfig, home: Background) -> None:
        self.config = config
        self.home = home
        self.offered: list[OfferedTool] | None = None
        self.wanted: set[str] = set()  # the tools that are used, by the server's names
        self.vanished: set[str] = set()
        self.leaving: set[asyncio.Task[None]] = set()  # connections that are being closed
        self.closed = False

    async def connect(self) -> Connection:
        from TrainingFactory.tools.mcp.connection import Connection

        limit = _starts.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(STARTS_AT_ONCE))
        connection = Connection(self.config, self.saw)
        async with limit:
            await connection.open()
        self.saw(connection.tools)
        return connection

    def dismiss(self, connection: Connection) -> asyncio.Task[None]:
        """Close it without waiting; `close` will."""
        task = self.home.start(connection.close())
        self.leaving.add(task)
        task.add_done_callback(self.leaving.discard)
        return task

    def saw(self, tools: list[OfferedTool]) -> None:
        if self.offered is None:
            self.offered = tools
            return
        before = {tool.name: tool.parameters for tool in self.offered if tool.name in self.wanted}
        now = {tool.name: tool.parameters for tool in tools}
        vanished = before.keys() - now.keys()
        changed = {name for name in before.keys() & now.keys() if before[name] != now[name]}
        if vanished != self.vanished or changed:
            log.warning(
                "server %r changed its tools; this run keeps those it began with (gone: %s; other arguments: %s)",
                self.config.name, ", ".join(sorted(vanished)) or "none", ", ".join(sorted(changed)) or "none",
            )  # fmt: skip
        self.vanished = set(vanished)
        self.offered = [*tools, *(tool for tool in self.offered if tool.name in vanished)]

    def gone(self, tool: str) -> ToolResult | None:
        if tool not in self.vanished:
            return None
        text = f"server {self.config.name!r} no longer offers {tool}"
        return ToolResult(text, ok=False, error="exception")  # the server itself is there

    def unavailable(self, error: Exception) -> ToolResult:
        log.info("%s", error)
        brief = str(error).split("; ", 1)[0].splitlines()[0]  # the server's own words are for the log
        return ToolResult(f"{brief}. It may come back later.", ok=False, error="unavailable")


class Line:
    """One shared connection that is kept up. `attempt` is what calls wait for: the first connection, or after a
    loss the next one, but not for longer than a model may be kept in the dark."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.connection: Connection | None = None
        self.attempt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.problem: Exception | None = None
        self.was_up = False
        self.task = server.home.start(self._keep())

    @property
    def up(self) -> Connection | None:
        connection = self.connection
        return None if connection is None or connection.lost.is_set() else connection

    async def _keep(self) -> None:
        from TrainingFactory.tools.mcp.connection import ServerDown

        failures, told = 0, False
        try:
            while True:
                await asyncio.sleep(pause(failures))
                try:
                    self.connection = await self.server.connect()
                except ServerDown as error:
                    failures += 1
                    if self.was_up and not told:
                        log.warning("%s; trying again", error)
                    self.problem, told = error, True
                    if not self.was_up:
                        self._settle()
                    continue
                if self.was_up:
                    log.warning("server %r is back", self.server.config.name)
                self.problem, self.was_up, told = None, True, False
                self._settle()
                connection = self.connection
                await connection.lost.wait()
                self.connection, self.problem = None, ServerDown(connection.farewell())
                # One that dies before it has answered a single call is not worth waiting for.
                failures = 0 if connection.served else failures + 1
                if failures < 2:
                    loop = asyncio.get_running_loop()
                    self.attempt = loop.create_future()
                    loop.call_later(PATIENCE, self._settle, self.attempt)
                log.warning("%s", self.problem)
                self.server.dismiss(connection)
        finally:
            self._settle()
            if self.connection is not None:
                await self.connection.close()
                self.connection = None

    def _settle(self, attempt: asyncio.Future[None] | None = None) -> None:
        attempt = attempt or self.attempt
        if not attempt.done():
            attempt.set_result(None)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


class SharedServer(Server):
    """All episodes use the same connections, the least busy one first."""

    def __init__(self, config: ServerConfig, home: Background) -> None:
        super().__init__(config, home)
        self._lines: list[Line] = []

    async def open(self) -> None:
        """Raises ServerDown if it cannot be reached at all."""
        self.start()
        for line in self._lines:
            await line.attempt
        for line in self._lines:
            if line.problem is not None and not line.was_up:
                raise line.problem

    def start(self) -> None:
        if not self._lines:
            self._lines = [Line(self) for _ in range(self.config.settings.instances)]

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        from TrainingFactory.tools.mcp.connection import ServerDown

        if self.closed:
            raise ToolFailure(f"the tools of server {self.config.name!r} are closed")
        for again in (True, False):
            try:
                connection = await self._least_busy()
                return self.gone(tool) or await connection.call(tool, arguments)
            except ServerDown as error:
                # What never reached the server may be sent once more, whatever the tool does.
                if error.sent or not again:
                    return self.unavailable(error)
                await asyncio.sleep(0)  # let the line see that it is down
        raise AssertionError("unreachable")

    @property
    def is_ready(self) -> bool:
        """May be asked from any thread."""
        return any(line.up for line in self._lines)

    async def until_ready(self) -> None:
        """Until a connection is up, or there is nothing to wait for."""
        if not self.closed and not self.is_ready:
            self.start()
            await asyncio.sleep(0)
            attempts = {line.attempt for line in self._lines if not line.attempt.done()}
            if attempts:
                await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)

    async def _least_busy(self) -> Connection:
        from TrainingFactory.tools.mcp.connection import ServerDown

        await self.until_ready()
        up = [connection for line in self._lines if (connection := line.up)]
        if not up:
            where = f"server {self.config.name!r} ({self.config.target})"
            problem = self._lines[0].problem or f"{where} is not available"
            raise ServerDown(str(problem), sent=True)
        return min(up, key=lambda connection: connection.busy)

    async def close(self) -> None:
        self.closed = True
        await asyncio.gather(*(line.close() for line in self._lines), *self.leaving)


class EpisodeServer(Server):
    """Every episode takes a connection of its own, which is closed after it. `instances` are kept ready, at most
    `max` exist at once; an episode that finds none waits in turn."""

    def __init__(self, config: ServerConfig, home: Background) -> None:
        super().__init__(config, home)
        self._ready: deque[Connection] = deque()
        self._waiting: deque[asyncio.Future[Connection]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._taken: set[Connection] = set()
        self._failures = 0
        self._not_before = 0.0
        self._problem: Exception | None = None
        self._told = False

    async def open(self) -> None:
        """The first one also shows what is offered; nobody has used it, so an episode may have it."""
        self._ready.append(await self.connect())
        self._fill()

    async def take(self) -> Connection:
        """Raises ServerDown if none can be started."""
        if self.closed:
            raise ToolFailure(f"the tools of server {self.config.name!r} are closed")
        self._drop_lost()
        if self._ready:
            connection = self._ready.popleft()
            self._taken.add(connection)
            self._fill()
            return connection
        loop = asyncio.get_running_loop()
        if self._problem is not None and loop.time() < self._not_before:
            raise self._problem
        place: asyncio.Future[Connection] = loop.create_future()
        self._waiting.append(place)
        self._fill()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._hand_out(place.result())  # it came too late for this one
            raise

    def give_back(self, connection: Connection) -> None:
        """It is closed, since an episode has used it."""
        self._taken.discard(connection)
        self.dismiss(connection).add_done_callback(lambda _: self._fill())

    def _fill(self) -> None:
        """Starts as many as are waited for and should be ready, as far as there is room."""
        if self.closed:
            return
        self._waiting = deque(place for place in self._waiting if not place.done())
        settings = self.config.settings
        wanted = len(self._waiting) + settings.instances - len(self._ready) - len(self._starting)
        used = len(self._ready) + len(self._starting) + len(self._taken) + len(self.leaving)
        if used >= settings.max and self._waiting and not self._told:
            self._told = True
            log.warning(
                "all %d sessions of server %r are in use and episodes wait; tfactory.max sets the number",
                settings.max, self.config.name,
            )  # fmt: skip
        for _ in range(min(wanted, settings.max - used)):
            task = self.home.start(self._start_one())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start_one(self) -> None:
        from TrainingFactory.tools.mcp.connection import ServerDown

        loop = asyncio.get_running_loop()
        try:
            if loop.time() < self._not_before:
                await asyncio.sleep(self._not_before - loop.time())
            connection = await self.connect()
        except ServerDown as error:
            self._failures += 1
            self._problem, self._not_before = error, loop.time() + pause(self._failures)
            log.warning("%s", error)
            while self._waiting:  # they can tell their models now, and try again later
                place = self._waiting.popleft()
                if not place.done():
                    place.set_exception(error)
            return
        self._failures, self._problem = 0, None
        self._hand_out(connection)

    def _hand_out(self, connection: Connection) -> None:
        self._taken.discard(connection)
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                self._taken.add(connection)
                place.set_result(connection)
                return
        if self.closed:
            self.dismiss(connection)
        else:
            self._ready.append(connection)

    def _drop_lost(self) -> None:
        for connection in [one for one in self._ready if one.lost.is_set()]:
            self._ready.remove(connection)
            self.give_back(connection)

    async def close(self) -> None:
        self.closed = True
        for task in list(self._starting):
            task.cancel()
        for place in self._waiting:
            place.cancel()
        for connection in (*self._ready, *self._taken):
            self.dismiss(connection)
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*self.leaving)


class Binding:
    """The side of one episode: its own connection to one server, taken at the first call."""

    def __init__(self, server: EpisodeServer) -> None:
        self.server = server
        self._taking: asyncio.Task[Connection] | None = None
        self._over = False

    @property
    def is_ready(self) -> bool:
        """Whether it is known if there is a connection. May be asked from any thread."""
        taking = self._taking
        return taking is not None and taking.done()

    async def until_ready(self) -> None:
        if not self._over:
            await asyncio.wait({self._take()})

    def _take(self) -> asyncio.Task[Connection]:
        if self._taking is None:
            self._taking = self.server.home.start(self.server.take())
        return self._taking

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        from TrainingFactory.tools.mcp.connection import ServerDown

        if self._over:
            raise ToolFailure(f"the episode's session with server {self.server.config.name!r} is closed")
        gone = self.server.gone(tool)
        if gone is not None:
            return gone
        try:
            connection = await asyncio.shield(self._take())
        except ServerDown as error:  # nothing has happened yet in this episode: it may go on without
            self._taking = None
            return self.server.unavailable(error)
        try:
            return await connection.call(tool, arguments)
        except ServerDown as error:
            # What the episode did there is lost; going on with a fresh server would be a lie.
            raise ToolFailure(f"the session of this episode ended: {error}") from error

    async def release(self) -> None:
        self._over = True
        taking, self._taking = self._taking, None
        if taking is None:
            return
        if not taking.done():
            taking.cancel()
            await asyncio.wait({taking})
        if not taking.cancelled() and taking.exception() is None:
            self.server.give_back(taking.result())


def make_server(config: ServerConfig, home: Background) -> SharedServer | EpisodeServer:
    return (SharedServer if config.settings.isolation == "shared" else EpisodeServer)(config, home)
