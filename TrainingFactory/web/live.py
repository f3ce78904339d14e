"""Server-sent events for changes of runs. The server polls the run's files, so that a run needs no connection to the
UI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from TrainingFactory.apps.views import runs as views
from TrainingFactory.apps.views.runs import LOG, Runs, read_log_part, read_metrics_part, stat_file
from TrainingFactory.apps.views.shapes import RunRow
from TrainingFactory.common.http.site import Event, Events, make_event
from TrainingFactory.data.disk import open_regular_file
from TrainingFactory.runs.folder import FINDINGS, METRICS, RunFolder

POLL_SECONDS = 0.4  # seconds between two polls
TAIL_BYTES = 1 << 20  # bytes at the end of a file that are searched for the last line break


class RunChanges(BaseModel):
    """New or changed runs, and names of deleted ones."""

    runs: list[RunRow]
    gone: list[str]


class RunEvents:
    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.is_stopping: Callable[[], bool] = lambda: False  # whether the server shuts down, ending streams
        self._poll: tuple[float, asyncio.Task[list[RunRow]]] | None = None  # start and task of the last poll

    async def _poll_runs(self) -> dict[str, RunRow]:
        """Return the rows of all runs by name. All clients share one poll of the files per tick."""
        now = asyncio.get_running_loop().time()
        if self._poll is None or (self._poll[1].done() and now - self._poll[0] >= POLL_SECONDS * 0.9):
            self._poll = now, asyncio.create_task(asyncio.to_thread(self.runs.list_rows))
        return {row.name: row for row in await asyncio.shield(self._poll[1])}

    async def stream(self, run: RunFolder | None) -> Events:
        """Yield events for changed rows of all runs, and for new metrics, log lines and findings of `run`."""
        rows_before = await self._poll_runs()
        reader = None if run is None else await asyncio.to_thread(_FileReader, run)
        yield make_event("runs", RunChanges(runs=[], gone=[]))  # tells the page that the stream is open
        while not self.is_stopping():
            await asyncio.sleep(POLL_SECONDS)
            rows = await self._poll_runs()
            changed_rows = [row for name, row in rows.items() if row is not rows_before.get(name)]
            gone_names = [name for name in rows_before if name not in rows]
            if changed_rows or gone_names:
                yield make_event("runs", RunChanges(runs=changed_rows, gone=gone_names))
            rows_before = rows
            if reader is not None and reader.run.name in rows:
                for event in await asyncio.to_thread(reader.read_events):
                    yield event


class _FileReader:
    """Reader of the changes of a run's files for one client."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._metrics_end, self._log_end = (_find_last_line_end(run.path / name) for name in (METRICS, LOG))
        self._findings_stat = stat_file(run.path / FINDINGS)

    def read_events(self) -> list[Event]:
        events = []
        if (metrics := read_metrics_part(self.run, self._metrics_end)).steps or metrics.again:
            events.append(make_event("metrics", metrics.model_copy(update={"start": self._metrics_end})))
        if (log := read_log_part(self.run, self._log_end)).text or log.again:
            events.append(make_event("log", log.model_copy(update={"start": self._log_end})))
        self._metrics_end, self._log_end = metrics.offset, log.offset
        if (stat := stat_file(self.run.path / FINDINGS)) != self._findings_stat:
            finding_rows = [finding.model_dump() for finding in views.list_findings(self.run)]
            events.append(make_event("findings", {"findings": finding_rows}))
        self._findings_stat = stat
        return events


def _find_last_line_end(path: Path) -> int:
    """Return the position after the last complete line of a file."""
    try:
        with open_regular_file(path) as file:
            tail_start = max(0, file.seek(0, 2) - TAIL_BYTES)
            file.seek(tail_start)
            return tail_start + file.read().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0
