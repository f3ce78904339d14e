"""News of the runs as events, a moment after they are written, whoever writes them: the files are looked at, so that a
run needs to know nothing of the page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from TrainingFactory.apps.views.runs import LOG, Runs, findings, log_part, metrics_part, stat_of
from TrainingFactory.apps.views.shapes import RunRow
from TrainingFactory.common.http.site import Event, Events, event
from TrainingFactory.data.disk import open_regular
from TrainingFactory.runs.folder import FINDINGS, METRICS, RunFolder

TICK = 0.4  # seconds between two looks
TAIL = 1 << 20  # bytes in which the last line of a file begins


class Changed(BaseModel):
    """Says which runs are new or have changed, and which are not there any more."""

    runs: list[RunRow]
    gone: list[str]


class Live:
    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        # Whether the server is about to end, and its streams with it.
        self.stopping: Callable[[], bool] = lambda: False
        self._last: tuple[float, asyncio.Task[list[RunRow]]] | None = None  # look, and when it began

    async def _look(self) -> dict[str, RunRow]:
        """Return the rows by name, which are looked at once a tick for all readers together."""
        now = asyncio.get_running_loop().time()
        if self._last is None or (self._last[1].done() and now - self._last[0] >= TICK * 0.9):
            self._last = now, asyncio.create_task(asyncio.to_thread(self.runs.rows))
        return {row.name: row for row in await asyncio.shield(self._last[1])}

    async def events(self, run: RunFolder | None) -> Events:
        """Yield what changes from now on: of all runs their rows, of one its metrics, log and findings too."""
        known = await self._look()
        news = None if run is None else await asyncio.to_thread(_News, run)
        yield event("runs", Changed(runs=[], gone=[]))  # so that the page knows that it is listened to
        while not self.stopping():
            await asyncio.sleep(TICK)
            rows = await self._look()
            changed = [row for name, row in rows.items() if row is not known.get(name)]
            gone = [name for name in known if name not in rows]
            if changed or gone:
                yield event("runs", Changed(runs=changed, gone=gone))
            known = rows
            if news is not None and news.run.name in rows:
                for each in await asyncio.to_thread(news.look):
                    yield each


class _News:
    """Knows how far one reader has read the files of a run."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._metrics, self._log = (_last_line_end(run.path / name) for name in (METRICS, LOG))
        self._findings = stat_of(run.path / FINDINGS)

    def look(self) -> list[Event]:
        found = []
        if (part := metrics_part(self.run, self._metrics)).steps or part.again:
            found.append(event("metrics", part.model_copy(update={"start": self._metrics})))
        if (text := log_part(self.run, self._log)).text or text.again:
            found.append(event("log", text.model_copy(update={"start": self._log})))
        self._metrics, self._log = part.offset, text.offset
        if (state := stat_of(self.run.path / FINDINGS)) != self._findings:
            found.append(event("findings", {"findings": [each.model_dump() for each in findings(self.run)]}))
        self._findings = state
        return found


def _last_line_end(path: Path) -> int:
    """Return the byte after the last whole line of a file."""
    try:
        with open_regular(path) as file:
            start = max(0, file.seek(0, 2) - TAIL)
            file.seek(start)
            return start + file.read().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0
