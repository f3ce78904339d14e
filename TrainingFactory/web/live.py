"""Server-sent events for changes of runs. The server polls the run's files, so that a run needs no connection to the
UI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from TrainingFactory.apps.views.runs import LOG, Runs, file_stat, findings, log_part, metrics_part
from TrainingFactory.apps.views.shapes import RunRow
from TrainingFactory.common.http.site import Event, Events, event
from TrainingFactory.data.disk import open_regular
from TrainingFactory.runs.folder import FINDINGS, METRICS, RunFolder

TICK = 0.4  # seconds between two polls
TAIL = 1 << 20  # bytes at the end of a file that are searched for the last line break


class RunChanges(BaseModel):
    """New or changed runs, and names of deleted ones."""

    runs: list[RunRow]
    gone: list[str]


class RunEvents:
    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.stopping: Callable[[], bool] = lambda: False  # whether the server shuts down, which ends streams
        self._last: tuple[float, asyncio.Task[list[RunRow]]] | None = None  # start and task of the last poll

    async def _look(self) -> dict[str, RunRow]:
        """Return the rows of all runs by name. All clients share one poll of the files per tick."""
        now = asyncio.get_running_loop().time()
        if self._last is None or (self._last[1].done() and now - self._last[0] >= TICK * 0.9):
            self._last = now, asyncio.create_task(asyncio.to_thread(self.runs.rows))
        return {row.name: row for row in await asyncio.shield(self._last[1])}

    async def events(self, run: RunFolder | None) -> Events:
        """Yield events for all later changes: changed rows of all runs, and new metrics, log lines and findings of
        `run`."""
        rows_before = await self._look()
        changes = None if run is None else await asyncio.to_thread(_News, run)
        yield event("runs", RunChanges(runs=[], gone=[]))  # tells the page that the stream is open
        while not self.stopping():
            await asyncio.sleep(TICK)
            rows = await self._look()
            changed = [row for name, row in rows.items() if row is not rows_before.get(name)]
            gone = [name for name in rows_before if name not in rows]
            if changed or gone:
                yield event("runs", RunChanges(runs=changed, gone=gone))
            rows_before = rows
            if changes is not None and changes.run.name in rows:
                for change in await asyncio.to_thread(changes.look):
                    yield change


class _News:
    """Positions up to which one client has read a run's files."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._metrics, self._log = (_last_line_end(run.path / name) for name in (METRICS, LOG))
        self._findings = file_stat(run.path / FINDINGS)

    def look(self) -> list[Event]:
        events = []
        if (part := metrics_part(self.run, self._metrics)).steps or part.again:
            events.append(event("metrics", part.model_copy(update={"start": self._metrics})))
        if (text := log_part(self.run, self._log)).text or text.again:
            events.append(event("log", text.model_copy(update={"start": self._log})))
        self._metrics, self._log = part.offset, text.offset
        if (state := file_stat(self.run.path / FINDINGS)) != self._findings:
            rows = [finding.model_dump() for finding in findings(self.run)]
            events.append(event("findings", {"findings": rows}))
        self._findings = state
        return events


def _last_line_end(path: Path) -> int:
    """Return the position after the last complete line of a file."""
    try:
        with open_regular(path) as file:
            start = max(0, file.seek(0, 2) - TAIL)
            file.seek(start)
            return start + file.read().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0
