"""Worker processes for jobs that need a model. They keep torch out of the server's process and isolate the server from
failures."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.http.site import Events, make_event
from TrainingFactory.common.workers import Worker, WorkerDied, WorkerError, WorkerTooSlow

WORKER_FUNCTION = "TrainingFactory.web.worker:answer"
IDLE_SECONDS = 300.0  # seconds after which an idle process is killed
JOB_TIMEOUT_SECONDS = 6 * 3600.0  # timeout of a job, in seconds
MAX_PROCESSES = 4  # maximum processes; beyond it, the least recently used idle ones are killed


class Pool:
    """Worker processes, one for each kind of job (`credit`, `check`, `promote`, `play:MODEL`), started on demand."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._jobs, self._last_jobs = Counter[str](), dict[str, object]()  # by kind: running jobs, last job

    async def ask(
        self, kind: str, job: str, arguments: dict[str, Any], report: Callable[[Any], None] = lambda _: None
    ) -> Any:
        """Run the job `job` of worker.py with `arguments` and return its result; `report` gets its progress messages.
        Cancelling the call kills the process."""
        worker = self._workers.setdefault(kind, Worker(WORKER_FUNCTION))
        self._jobs[kind] += 1
        idle_kinds = [name for name in self._last_jobs if self._workers[name].alive and not self._jobs[name]]
        for name in idle_kinds[: max(0, len(idle_kinds) + self._jobs.total() - MAX_PROCESSES)]:
            self._workers[name].kill()
        try:
            answer = await worker.ask({"job": job, "given": arguments}, JOB_TIMEOUT_SECONDS, report)
        except WorkerError as error:
            raise ApiError(f"the job failed: {error}", status=500, code="worker_failed") from error
        except (WorkerDied, WorkerTooSlow) as error:
            raise ApiError(f"the worker process {error}", status=500, code="worker_failed") from error
        finally:
            self._jobs[kind] -= 1
            self._last_jobs.pop(kind, None)
            self._last_jobs[kind] = job_id = object()  # moves the kind to the end: most recently used
            asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_idle_worker, kind, job_id)
        if (error_text := answer.get("wrong")) is not None:
            raise ApiError(error_text)
        return answer["ok"]

    async def stream(
        self, kind: str, job: str, arguments: dict[str, Any], end_job: Callable[[], None] | None = None
    ) -> Events:
        """Run a job; yield each of its progress messages as a server-sent event named `told`, then its result as an
        event named `done`. If the client disconnects, call `end_job`; without `end_job`, kill the job's
        process."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        job_task = asyncio.create_task(self.ask(kind, job, arguments, messages.put_nowait))
        job_task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield make_event("told", message)
            yield make_event("done", await job_task)
        finally:
            ended_job = asyncio.gather(job_task, return_exceptions=True)
            (end_job or job_task.cancel)()
            if end_job is None:
                await ended_job

    def _end_idle_worker(self, kind: str, job_id: object) -> None:
        if self._last_jobs[kind] is job_id and not self._jobs[kind]:
            self._workers[kind].kill()

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers.values()))
