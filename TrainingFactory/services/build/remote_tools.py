"""Tools that run on the machines of a Ray cluster. Only the call itself travels: what holds for every call (schema,
time, attempts, limits, cache, recording) stays in the run's own process, so that limits are those of the cluster."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from TrainingFactory.cluster.ray_session import RaySession
from TrainingFactory.cluster.ray_workers import RayWorker, machines
from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.types import ToolFailure, ToolResult
from TrainingFactory.workers import WorkerDied, WorkerError

Handed = Tool | ToolSource
CLOSE_SECONDS = 10.0  # for an interpreter to end
GONE = "; the next call begins in a fresh process, and what this episode had there is gone"
HOST = "TrainingFactory.services.build.tool_host:start"


class Executors:
    """The processes on the cluster that run tools: so many, or one on each machine. An episode keeps to one of them."""

    def __init__(self, count: int | None, ray: RaySession) -> None:
        self.entries: list[ToolEntry] = []
        self._count, self._ray = count, ray
        self._workers: list[RayWorker] = []
        self._episodes: Counter[RayWorker] = Counter()

    async def open(self) -> None:
        """Start all of them; raise ValueError where one cannot have the tools."""
        if self._workers:
            return
        await self._ray.open()
        settings = [entry.model_dump() for entry in self.entries]
        count = self._count or len(machines())
        self._workers = [RayWorker(HOST, settings, what="tools", number=number) for number in range(count)]
        try:
            await asyncio.gather(*(worker.ready() for worker in self._workers))
        except (WorkerDied, WorkerError) as error:
            names = ", ".join(entry.name for entry in self.entries)
            raise ValueError(
                f"a process for the tools {names} cannot be had on the cluster: {error}; files of tools must have "
                "the same path on every machine; remote: false keeps a tool on this one"
            ) from error

    def enter(self) -> RayWorker:
        """Return the one with the fewest episodes, for another one."""
        chosen = min(self._workers, key=lambda worker: self._episodes[worker])
        self._episodes[chosen] += 1
        return chosen

    def leave(self, worker: RayWorker) -> None:
        self._episodes[worker] -= 1

    async def close(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            await worker.close()
        await self._ray.close()


class RemoteTools:
    """The tools of an entry as a source whose calls are made on the cluster. `tools` are the same in this process: they
    say what the model is told, and how a call is checked and bounded."""

    def __init__(self, tools: Sequence[Handed], executors: Executors) -> None:
        self._tools, self._executors = tools, executors

    async def open(self) -> None:
        await self._executors.open()

    def session(self) -> RemoteSession:
        return RemoteSession(AsyncToolExecutor(self._tools), self._executors)

    async def close(self) -> None:
        await self._executors.close()


class RemoteSession:
    """Makes the calls of one episode, all on one machine."""

    def __init__(self, local: AsyncToolExecutor, executors: Executors) -> None:
        self._local, self._executors = local, executors
        self.tools = [RemoteTool(tool, self.call) for tool in local.tools]
        self._name = secrets.token_hex(8)
        self._worker: RayWorker | None = None

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        begun = self._worker is not None and self._local.holds_sessions
        worker = self._worker = self._worker or self._executors.enter()
        message = {"episode": self._name, "begun": begun, "tool": tool, "arguments": arguments}
        try:
            answer = await worker.ask(message)
        except (WorkerDied, WorkerError) as error:
            text = f"{tool} gave no answer: its process on the cluster {error}"
            text += GONE if self._local.holds_sessions else ""
            return ToolResult(text, ok=False, error="unavailable")
        if isinstance(answer, str):
            raise ToolFailure(answer)
        return ToolResult(**answer)

    async def close(self) -> None:
        await self._local.close()
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._executors.leave(worker)
        if worker.alive:
            with suppress(WorkerDied, WorkerError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await worker.ask({"episode": self._name})


class RemoteTool:
    def __init__(
        self, tool: Tool, call: Callable[[str, dict[str, Any]], Coroutine[Any, Any, ToolResult]]
    ) -> None:
        self.spec, self._call = tool.spec, call
        if options := getattr(tool, "options", None):  # a foreign tool need not have any
            self.options = options
        self.__wrapped__ = tool  # the cache has to see who answers

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await self._call(self.spec.name, arguments)
