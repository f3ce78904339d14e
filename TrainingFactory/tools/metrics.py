"""Counts how the tools of a run are doing: per tool and for all of them together."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

from TrainingFactory.types import ToolResult

MAX_TIMES = 4096  # durations kept for the percentiles: those of the latest calls
COUNTED = {"schema": "schema_errors", "timeout": "timeouts", "unavailable": "unavailable"}
NO_TOOL = ("unknown", "malformed")  # errors of calls that belong to no tool


@dataclass(slots=True)
class _Stats:
    """Of one tool, or of all together."""

    calls: int = 0
    good: int = 0
    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED.values(), 0))
    retries: int = 0
    cache_hits: int = 0
    waited: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    busy: float = 0.0  # seconds in which at least one call was under way, up to `since`
    running: int = 0
    since: float = 0.0

    def began(self, now: float) -> None:
        if self.running == 0:
            self.since = now
        self.running += 1

    def finished(self, now: float) -> None:
        self.running -= 1
        if self.running == 0:
            self.busy += now - self.since

    def add(self, result: ToolResult, seconds: float | None) -> None:
        self.calls += 1
        self.good += result.ok
        if result.error in COUNTED:
            self.errors[COUNTED[result.error]] += 1
        self.cache_hits += result.cached
        if seconds is not None:
            self.times.append(seconds)

    def cut(self, now: float) -> _Stats:
        """End here, and return what goes on after `now`."""
        if self.running:
            self.busy += now - self.since
        return _Stats(running=self.running, since=now)

    def named(self, prefix: str, wall: float) -> dict[str, float]:
        """Return the metrics by name. Shares and percentiles over nothing are left out, not zero."""
        named: dict[str, float] = {"calls": self.calls, **self.errors}
        named |= {"retries": self.retries, "cache_hits": self.cache_hits, "waited": self.waited}
        if self.calls:
            named["success"] = self.good / self.calls
        if self.times:
            ordered = sorted(self.times)
            named["p50"], named["p95"] = (ordered[int(len(ordered) * part)] for part in (0.5, 0.95))
        if wall > 0:
            named["wall_share"] = min(1.0, self.busy / wall)
        return {f"{prefix}/{name}": value for name, value in named.items()}


class _Period:
    """Stats of a step, or of the whole run."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.all = _Stats()
        self.tools: defaultdict[str, _Stats] = defaultdict(_Stats)
        self.no_tool = dict.fromkeys(NO_TOOL, 0)

    def next(self, now: float) -> _Period:
        """End here, and return the period that begins."""
        period = _Period(now)
        period.all = self.all.cut(now)
        cut = {name: stats.cut(now) for name, stats in self.tools.items()}
        period.tools.update({name: stats for name, stats in cut.items() if stats.running})
        return period

    def named(self, now: float) -> dict[str, float]:
        """Return the metrics by name; a tool that was not called is left out."""
        wall = now - self.started
        named: dict[str, float] = {f"tools/{name}": count for name, count in self.no_tool.items()}
        named |= self.all.named("tools", wall)
        for name, stats in self.tools.items():
            if stats.calls:
                named |= stats.named(f"tools/{name}", wall)
        return named


class ToolMetrics:
    """Counts since the last `snapshot`, and since the beginning. Memory is bounded by the number of tools.

    `p50` and `p95` are seconds of calls that were really made, waiting and further attempts included; `waited` are
    seconds spent at limits, `wall_share` is the share of the time in which at least one call was under way.
    """

    def __init__(self) -> None:
        now = time.perf_counter()
        self._step, self._run = _Period(now), _Period(now)

    def began(self, tool: str) -> float:
        """Note that a call of the tool is under way; `finished` must follow. Return the time."""
        now = time.perf_counter()
        for stats in self._of(tool):
            stats.began(now)
        return now

    def finished(self, tool: str, started: float, result: ToolResult | None) -> None:
        """Count a call; `result` is None where it was broken off."""
        now = time.perf_counter()
        made = result is not None and not result.cached and result.error != "schema"
        for stats in self._of(tool):
            stats.finished(now)
            if result is not None:
                stats.add(result, now - started if made else None)

    def answered(self, tool: str | None, result: ToolResult) -> None:
        """Count a call that was answered without any tool: unknown, malformed, or replayed."""
        for period in (self._step, self._run):
            if result.error in NO_TOOL:
                period.no_tool[result.error] += 1
            period.all.add(result, None)
            if tool is not None:
                period.tools[tool].add(result, None)

    def retried(self, tool: str) -> None:
        for stats in self._of(tool):
            stats.retries += 1

    def waited(self, tool: str, seconds: float) -> None:
        for stats in self._of(tool):
            stats.waited += seconds

    def snapshot(self) -> dict[str, float]:
        """Return the metrics since the last snapshot."""
        now = time.perf_counter()
        ended, self._step = self._step, self._step.next(now)
        return ended.named(now)

    def totals(self) -> dict[str, float]:
        """Return the metrics of the whole run."""
        return self._run.named(time.perf_counter())

    def _of(self, tool: str) -> tuple[_Stats, ...]:
        step, run = self._step, self._run
        return step.all, step.tools[tool], run.all, run.tools[tool]
