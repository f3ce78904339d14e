"""Counts how the tools of a run are doing: per tool and for all of them together."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from TrainingFactory.types import ToolResult

MAX_TIMES = 4096  # durations kept for the percentiles: those of the latest calls
COUNTED = {"schema": "schema_errors", "timeout": "timeouts", "unavailable": "unavailable"}
NO_TOOL = {"unknown": "unknown", "malformed": "malformed"}  # errors of calls that belong to no tool
ALL = ""  # stands for all tools together


@dataclass(slots=True)
class _Stats:
    """Of one tool, or of all together."""

    calls: int = 0
    good: int = 0
    errors: Counter[str | None] = field(default_factory=Counter)
    retries: int = 0
    cache_hits: int = 0
    waited: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    busy: float = 0.0  # seconds in which at least one call was under way, up to `since`
    running: int = 0
    since: float = 0.0

    def run(self, change: int, now: float) -> None:
        if self.running:
            self.busy += now - self.since
        self.running += change
        self.since = now

    def add(self, result: ToolResult, seconds: float | None) -> None:
        self.calls += 1
        self.good += result.ok
        self.errors[result.error] += 1
        self.cache_hits += result.cached
        if seconds is not None:
            self.times.append(seconds)

    def named(self, tool: str, wall: float) -> dict[str, float]:
        """Return the metrics by name. Shares and percentiles over nothing are left out, not zero."""
        kinds = COUNTED if tool else COUNTED | NO_TOOL
        named: dict[str, float] = {name: self.errors[kind] for kind, name in kinds.items()}
        named |= {"calls": self.calls, "retries": self.retries, "cache_hits": self.cache_hits}
        named["waited"] = self.waited
        if self.calls:
            named["success"] = self.good / self.calls
        if self.times:
            ordered = sorted(self.times)
            named["p50"], named["p95"] = (ordered[int(len(ordered) * part)] for part in (0.5, 0.95))
        if wall > 0:
            named["wall_share"] = min(1.0, self.busy / wall)
        prefix = f"tools/{tool}/" if tool else "tools/"
        return {prefix + name: value for name, value in named.items()}


class _Period:
    """Stats of a step, or of the whole run, by tool."""

    def __init__(self, started: float, running: Mapping[str, int]) -> None:
        self.started = started
        self.stats: defaultdict[str, _Stats] = defaultdict(_Stats)
        for tool, count in running.items():
            self.stats[tool].run(count, started)

    def named(self, now: float) -> dict[str, float]:
        """Return the metrics by name; a tool that was not called is left out."""
        named: dict[str, float] = {}
        for tool in (ALL, *filter(None, list(self.stats))):
            stats = self.stats[tool]
            stats.run(0, now)
            if stats.calls or tool == ALL:
                named |= stats.named(tool, now - self.started)
        return named


class ToolMetrics:
    """Counts since the last `snapshot`, and since the beginning. Memory is bounded by the number of tools."""

    def __init__(self) -> None:
        now = time.perf_counter()
        self._step, self._run = _Period(now, {}), _Period(now, {})

    def began(self, tool: str) -> float:
        """Note that a call of the tool is under way; `finished` must follow. Return the time."""
        now = time.perf_counter()
        for stats in self._of(ALL, tool):
            stats.run(1, now)
        return now

    def finished(self, tool: str, started: float, result: ToolResult | None) -> None:
        """Count a call; `result` is None where it was broken off."""
        now = time.perf_counter()
        made = result is not None and not result.cached and result.error != "schema"
        for stats in self._of(ALL, tool):
            stats.run(-1, now)
            if result is not None:
                stats.add(result, now - started if made else None)

    def answered(self, tool: str | None, result: ToolResult) -> None:
        """Count a call that was answered without any tool: unknown, malformed, or replayed."""
        for stats in self._of(ALL) if tool is None else self._of(ALL, tool):
            stats.add(result, None)

    def retried(self, tool: str) -> None:
        for stats in self._of(ALL, tool):
            stats.retries += 1

    def waited(self, tool: str, seconds: float) -> None:
        for stats in self._of(ALL, tool):
            stats.waited += seconds

    def snapshot(self) -> dict[str, float]:
        """Return the metrics since the last snapshot."""
        now, ended = time.perf_counter(), self._step
        self._step = _Period(now, {tool: stats.running for tool, stats in ended.stats.items()})
        return ended.named(now)

    def totals(self) -> dict[str, float]:
        """Return the metrics of the whole run."""
        return self._run.named(time.perf_counter())

    def _of(self, *tools: str) -> list[_Stats]:
        return [period.stats[tool] for period in (self._step, self._run) for tool in tools]
