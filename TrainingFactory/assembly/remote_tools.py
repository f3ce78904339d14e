"""Tools that run on the machines of a Ray cluster. Only the call itself is remote: schema checks, timeouts, retries,
limits, cache and recording stay in the run's process, so that limits hold for the whole cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from TrainingFactory.cluster.ray_session import require_ray
from TrainingFactory.cluster.ray_workers import RayWorker
from TrainingFactory.common.texts import describe
from TrainingFactory.common.workers import WorkerDied, WorkerError, WorkerTooSlow
from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.protocols import Tool, ToolSource
from TrainingFactory.tools import AsyncToolExecutor, ToolOptions
from TrainingFactory.tools.runtime import is_no_answer_error, run_tool
from TrainingFactory.types import ToolFailure, ToolResult

TOOLS_MAKER = "TrainingFactory.assembly.tools:make_hosted_tools"
CLOSE_SECONDS = 10.0  # for an interpreter to end
STATE_LOST_TEXT = "; this episode's state there is lost"
NEW_PROCESS_NOTE = f"[new process: the previous one died{STATE_LOST_TEXT}]\n"


class RemoteTools:
    """All tools of a run that are called on the cluster, in `num_workers` processes or one per machine. The run's own
    process holds the same tools: they provide the specs for the model, and the checks and limits of a call."""

    def __init__(self, num_workers: int | None) -> None:
        self._num_workers = num_workers
        self.tool_entries: list[ToolEntry] = []
        self.tools: list[Tool | ToolSource] = []
        self._workers: list[RayWorker] = []
        self.episodes_by_worker: Counter[RayWorker] = Counter()

    async def open(self) -> None:
        """Start the processes; raise ValueError if one cannot load the tools."""
        await asyncio.gather(*(tool.open() for tool in self.tools if isinstance(tool, ToolSource)))
        tool_settings = [entry.model_dump() for entry in self.tool_entries]
        num_workers = self._num_workers or sum(node["Alive"] for node in require_ray().nodes())
        self._workers = [RayWorker(TOOLS_MAKER, tool_settings, role="tools") for _ in range(num_workers)]
        try:
            await asyncio.gather(*(worker.ensure_actor() for worker in self._workers))
        except (WorkerDied, WorkerError, WorkerTooSlow) as error:
            raise ValueError(
                f"a tool process could not be started on the cluster: {error}; tool files need the same path on every "
                "machine, and remote: false keeps a tool on this one"
            ) from error

    def session(self) -> RemoteSession:
        return RemoteSession(self, AsyncToolExecutor(self.tools))

    def pick_least_used(self) -> RayWorker:
        return min(self._workers, key=lambda worker: self.episodes_by_worker[worker])

    async def close(self) -> None:
        for worker in self._workers:
            await worker.close()


class RemoteSession:
    """The remote calls of one episode, all in one process."""

    def __init__(self, remote_tools: RemoteTools, local_executor: AsyncToolExecutor) -> None:
        self._remote_tools, self._local_executor = remote_tools, local_executor
        self.tools = [_RemoteTool(tool, self) for tool in local_executor.tools]
        self._episode_id = secrets.token_hex(8)
        self._worker: RayWorker | None = None

    async def call(self, tool_name: str, arguments: dict[str, Any]) -> tuple[ToolResult, int]:
        """Run a tool call in the episode's process on the cluster; return the result and the process's number."""
        if self._worker is None:
            self._worker = self._remote_tools.pick_least_used()
            self._remote_tools.episodes_by_worker[self._worker] += 1
        try:
            reply = await self._worker.ask([self._episode_id, tool_name, arguments])
        except (WorkerDied, WorkerError, WorkerTooSlow) as error:
            message = f"{tool_name} gave no answer: its process on the cluster {error}{STATE_LOST_TEXT}"
            return ToolResult(message, ok=False, error="unavailable"), self._worker.num_starts
        if isinstance(reply, str):
            raise ToolFailure(reply)
        return ToolResult(**reply), self._worker.num_starts

    async def close(self) -> None:
        await self._local_executor.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            self._remote_tools.episodes_by_worker[worker] -= 1
        if worker is not None and worker.alive:
            with suppress(WorkerDied, WorkerError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await worker.ask([self._episode_id, None, {}])


class _RemoteTool:
    def __init__(self, tool: Tool, session: RemoteSession) -> None:
        self.spec, self._session = tool.spec, session
        self.options: ToolOptions = getattr(tool, "options", ToolOptions())  # a foreign one may have none
        self.__wrapped__ = tool  # the cache has to see who answers
        self._process_number: int | None = None  # the process that holds its state

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        result, process_number = await self._session.call(self.spec.name, arguments)
        previous_process, self._process_number = self._process_number or process_number, process_number
        if previous_process != process_number and self.options.ordered and result.error != "unavailable":
            result.content = NEW_PROCESS_NOTE + result.content
        return result


class HostedTools:
    """The tools in a process on the cluster, with an executor per episode."""

    def __init__(self, tools: Sequence[Tool | ToolSource]) -> None:
        self._tools = tools
        self._episodes: dict[str, AsyncToolExecutor] = {}

    async def answer(self, message: list[Any]) -> dict[str, Any] | str | None:
        """Return a call's result, or the tool's failure as text. A message without a tool name ends the episode."""
        episode_id, tool_name, arguments = message
        if tool_name is None:
            if (episode_tools := self._episodes.pop(episode_id, None)) is not None:
                await episode_tools.close()
            return None
        if episode_id not in self._episodes:
            self._episodes[episode_id] = AsyncToolExecutor(self._tools)
        tool = next(tool for tool in self._episodes[episode_id].tools if tool.spec.name == tool_name)
        try:
            return dataclasses.asdict(await run_tool(tool, arguments))
        except ToolFailure as error:
            return str(error)
        except Exception as error:  # foreign code
            failure_kind = "unavailable" if is_no_answer_error(error) else "exception"
            return {"content": f"{tool_name} failed: {describe(error)}", "ok": False, "error": failure_kind}
