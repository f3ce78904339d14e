"""Child processes for what needs a model: torch stays out of the page's own, and what fails there fails alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.http.site import Events, event
from TrainingFactory.common.workers import Worker, WorkerDied, WorkerError, WorkerTooSlow

TARGET = "TrainingFactory.web.worker:answer"
IDLE = 300.0  # seconds after which a process that nobody asks is ended
LONGEST = 6 * 3600.0  # seconds of a job
MOST = 4  # processes, beyond which those that were not asked for the longest time are ended


class Pool:
    """One process for each kind of job: `credit`, `check`, `promote`, `play:MODEL`. It is started by its first job."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._busy, self._asked = Counter[str](), dict[str, object]()  # by kind: jobs under way, the last job

    async def ask(
        self, kind: str, job: str, given: dict[str, Any], hear: Callable[[Any], None] = lambda _: None
    ) -> Any:
        """Return what the job `job` of worker.py makes of `given`; `hear` gets what it tells on the way. Who stops to
        wait ends the process."""
        worker = self._workers.setdefault(kind, Worker(TARGET))
        self._busy[kind] += 1
        idle = [each for each in self._asked if self._workers[each].alive and not self._busy[each]]
        for each in idle[: max(0, len(idle) + self._busy.total() - MOST)]:
            self._workers[each].kill()
        try:
            answer = await worker.ask({"job": job, "given": given}, LONGEST, hear)
        except WorkerError as error:
            raise ApiError(f"this failed: {error}", status=500, code="worker_failed") from error
        except (WorkerDied, WorkerTooSlow) as error:
            raise ApiError(f"the process for this {error}", status=500, code="worker_failed") from error
        finally:
            self._busy[kind] -= 1
            self._asked.pop(kind, None)
            self._asked[kind] = asked = object()  # the last of them now
            asyncio.get_running_loop().call_later(IDLE, self._end_idle, kind, asked)
        if (wrong := answer.get("wrong")) is not None:
            raise ApiError(wrong)
        return answer["ok"]

    async def events(
        self, kind: str, job: str, given: dict[str, Any], leave: Callable[[], None] | None = None
    ) -> Events:
        """Yield what a job tells as events `told`, and what it makes as the event `done`. A job that nobody listens to
        any more is asked to end by `leave`; without it its process is ended."""
        heard: asyncio.Queue[Any] = asyncio.Queue()
        work = asyncio.create_task(self.ask(kind, job, given, heard.put_nowait))
        work.add_done_callback(lambda _: heard.put_nowait(None))
        try:
            while (told := await heard.get()) is not None:
                yield event("told", told)
            yield event("done", await work)
        finally:
            ended = asyncio.gather(work, return_exceptions=True)
            (leave or work.cancel)()
            if leave is None:
                await ended

    def _end_idle(self, kind: str, asked: object) -> None:
        if self._asked[kind] is asked and not self._busy[kind]:
            self._workers[kind].kill()

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))
