"""Count how the tools of a run are doing: per tool and for all of them together. Counts belong to the episode that
made the calls, so that a step reports the calls of the episodes that it trains, whenever they were played."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from TrainingFactory.types import ToolResult

MAX_TIMES = 4096  # durations kept for the percentiles: those of the latest calls
MAX_EPISODES = 50_000  # with counts since the last snapshot; the oldest are dropped
COUNTED = {"schema": "schema_errors", "timeout": "timeouts", "unavailable": "unavailable"}
NO_TOOL = {"unknown": "unknown", "malformed": "malformed"}  # errors of calls that belong to no tool
ALL = ""  # stands for all tools together


@dataclass(slots=True)
class _Counts:
    """Counts of one tool, or of all together."""

    calls: int = 0
    good: int = 0
    errors: Counter[str | None] = field(default_factory=Counter)
    retries: int = 0
    cache_hits: int = 0
    waited: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))

    def add(self, result: ToolResult, seconds: float | None) -> None:
        self.calls += 1
        self.good += result.ok
        self.errors[result.error] += 1
        self.cache_hits += result.cached
        if seconds is not None:
            self.times.append(seconds)

    def merge(self, other: _Counts) -> None:
        self.calls += other.calls
        self.good += other.good
        self.errors.update(other.errors)
        self.retries += other.retries
        self.cache_hits += other.cache_hits
        self.waited += other.waited
        self.times.extend(other.times)

    def named(self, tool: str) -> dict[str, float]:
        """Return the metrics by name. Percentiles over nothing are left out, not zero."""
        kinds = COUNTED if tool else COUNTED | NO_TOOL
        named: dict[str, float] = {name: self.errors[kind] for kind, name in kinds.items()}
        named |= {"calls": self.calls, "retries": self.retries, "cache_hits": self.cache_hits}
        named |= {"waited": self.waited, "success": self.good / self.calls}
        if self.times:
            ordered = sorted(self.times)
            named["p50"], named["p95"] = (ordered[int(len(ordered) * part)] for part in (0.5, 0.95))
        return {_prefix(tool) + name: value for name, value in named.items()}


@dataclass(slots=True)
class _Timer:
    """Measure the seconds in which at least one call of a tool was under way, up to `since`."""

    busy: float = 0.0
    running: int = 0
    since: float = 0.0

    def run(self, change: int, now: float) -> None:
        if self.running:
            self.busy += now - self.since
        self.running += change
        self.since = now

    def take(self, now: float) -> float:
        """Return the seconds since the last time."""
        self.run(0, now)
        busy, self.busy = self.busy, 0.0
        return busy


class ToolMetrics:
    """Hold the counts of each episode until `snapshot` or `drop` takes them, and those of the whole run."""

    def __init__(self) -> None:
        self._since = time.perf_counter()  # the last snapshot
        self._timers: defaultdict[str, _Timer] = defaultdict(_Timer)
        self._episodes: dict[Hashable, defaultdict[str, _Counts]] = {}
        self._total: defaultdict[str, _Counts] = defaultdict(_Counts)

    def began(self, tool: str) -> float:
        """Note that a call of the tool is under way; `finished` must follow. Return the time."""
        now = time.perf_counter()
        self._run_timers(tool, 1, now)
        return now

    def finished(
        self, tool: str, started: float, result: ToolResult | None, episode: Hashable = None
    ) -> None:
        """Count a call; `result` is None where it was broken off."""
        now = time.perf_counter()
        self._run_timers(tool, -1, now)
        if result is not None:
            made = not result.cached and result.error != "schema"
            for counts in self._of(episode, ALL, tool):
                counts.add(result, now - started if made else None)

    def answered(self, tool: str | None, result: ToolResult, episode: Hashable = None) -> None:
        """Count a call that was answered without any tool: unknown, malformed, or replayed."""
        for counts in self._of(episode, ALL) if tool is None else self._of(episode, ALL, tool):
            counts.add(result, None)

    def retried(self, tool: str, episode: Hashable = None) -> None:
        for counts in self._of(episode, ALL, tool):
            counts.retries += 1

    def waited(self, tool: str, seconds: float, episode: Hashable = None) -> None:
        for counts in self._of(episode, ALL, tool):
            counts.waited += seconds

    def snapshot(self, wanted: Callable[[Any], bool] = lambda _: True) -> dict[str, float]:
        """Return the metrics of these episodes, once; those of the others wait. `wall_share` is that of the time since
        the last snapshot."""
        counts: defaultdict[str, _Counts] = defaultdict(_Counts)
        for episode in [each for each in list(self._episodes) if wanted(each)]:
            for tool, found in self._episodes.pop(episode).items():
                counts[tool].merge(found)
        now, since = time.perf_counter(), self._since
        self._since = now
        busy = {tool: timer.take(now) for tool, timer in self._timers.items()}
        return _named(counts) | {
            f"{_prefix(tool)}wall_share": min(1.0, seconds / (now - since))
            for tool, seconds in busy.items()
            if counts[tool].calls and now > since
        }

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget the counts of these episodes."""
        for episode in list(self._episodes):
            if unwanted(episode):
                del self._episodes[episode]

    def totals(self) -> dict[str, float]:
        """Return the metrics of the whole run."""
        return _named(self._total)

    def _of(self, episode: Hashable, *tools: str) -> list[_Counts]:
        own = self._episodes.get(episode)
        if own is None:
            if len(self._episodes) >= MAX_EPISODES:
                del self._episodes[next(iter(self._episodes))]
            own = self._episodes[episode] = defaultdict(_Counts)
        return [counts[tool] for counts in (own, self._total) for tool in tools]

    def _run_timers(self, tool: str, change: int, now: float) -> None:
        for name in (ALL, tool):
            self._timers[name].run(change, now)


def _prefix(tool: str) -> str:
    return f"tools/{tool}/" if tool else "tools/"


def _named(counts: defaultdict[str, _Counts]) -> dict[str, float]:
    """Return the metrics by name; what was not called is left out."""
    named: dict[str, float] = {}
    for tool in (ALL, *filter(None, list(counts))):
        if counts[tool].calls:
            named |= counts[tool].named(tool)
    return named
