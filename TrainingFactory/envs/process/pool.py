"""The processes of an environment, shared by the episodes of a run."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

from TrainingFactory.envs.process.process import EnvironmentProcess, EpisodeLost, ProcessLost, Program


class ProcessPool:
    """Pool that starts a process when all others have `episodes_per_process` episodes. A lost process is counted, and
    replaced when the next episode starts. Use `close` on the event loop of the episodes; a later episode starts
    processes again."""

    def __init__(self, program: Program, episodes_per_process: int) -> None:
        self.program, self.episodes_per_process = program, episodes_per_process
        self.processes: list[EnvironmentProcess] = []
        # Since the last `metrics`: stop reasons of episodes, crashed processes, and lost episodes.
        self._event_counts: Counter[str] = Counter()
        self._name_counter = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop | None = None

    def open_episode(self) -> PooledEpisode:
        """Open an episode in a process that has room for one more, or in a new process."""
        if self._loop is not (loop := asyncio.get_running_loop()):
            for process in self.processes:
                process.abandon()
            self._loop, self.processes = loop, []
        self._remove_lost_processes()
        for process in self.processes:
            if process.is_responsive and len(process.episode_names) < self.episodes_per_process:
                break
        else:
            process = EnvironmentProcess(self.program)
            self.processes.append(process)
        episode = PooledEpisode(self, process, f"e{next(self._name_counter)}")
        process.episode_names.add(episode.name)
        return episode

    def _remove_lost_processes(self) -> None:
        for process in [process for process in self.processes if process.error is not None]:
            self.processes.remove(process)
            self._event_counts["crashes"] += 1
            self._event_counts["lost_episodes"] += len(process.episode_names)

    async def release(self, episode: PooledEpisode) -> None:
        """Remove an episode from its process. If the process then has no episodes, end it if it does not answer or if
        processes have only one episode each."""
        process = episode.process
        if process.error is not None:
            self._remove_lost_processes()
        process.episode_names.discard(episode.name)
        process.notify("close", episode=episode.name)
        is_idle = not process.episode_names and (self.episodes_per_process == 1 or not process.is_responsive)
        if is_idle and process in self.processes:
            self.processes.remove(process)
            await process.close()

    def count_lost_episode(self) -> None:
        self._event_counts["lost_episodes"] += 1

    def count_stop(self, reason: str) -> None:
        self._event_counts[f"stop/{reason}"] += 1

    def metrics(self) -> dict[str, float]:
        """Return the number of processes, and the crashes, lost episodes and stop reasons since the last call."""
        self._remove_lost_processes()
        counts = Counter({"processes": len(self.processes), "crashes": 0, "lost_episodes": 0})
        counts.update(self._event_counts)
        self._event_counts.clear()
        return {f"environment/{name}": float(count) for name, count in counts.items()}

    async def close(self) -> None:
        """End all processes. A second call does nothing."""
        self._remove_lost_processes()
        processes, self.processes = self.processes, []
        await asyncio.gather(*(process.close() for process in processes))


class PooledEpisode:
    """One episode in a process of the pool."""

    def __init__(self, pool: ProcessPool, process: EnvironmentProcess, name: str) -> None:
        self._pool, self.process, self.name = pool, process, name

    @property
    def description(self) -> dict[str, Any]:
        return self.process.description

    async def request(self, method: str, **fields: Any) -> dict[str, Any]:
        await self.process.wait_until_ready()
        try:
            return await self.process.request(method, episode=self.name, **fields)
        except EpisodeLost:
            if method != "reset":  # which is repeated
                self._pool.count_lost_episode()
            raise

    async def close(self) -> None:
        await self._pool.release(self)


async def request_once(program: Program, method: str, timeout: float, **fields: Any) -> dict[str, Any]:
    """Start a process, send one request, and end the process."""
    process = EnvironmentProcess(program)
    try:
        await process.wait_until_ready()
        async with asyncio.timeout(timeout):
            return await process.request(method, **fields)
    except TimeoutError:
        raise ProcessLost(f"environment {program.name}: {method} took longer than {timeout:g} s") from None
    finally:
        await process.close()
