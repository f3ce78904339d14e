"""How the tools of a run are doing, in figures: per tool and for all of them together."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from TrainingFactory.types import ToolResult

MAX_TIMES = 4096  # durations kept for the percentiles: those of the latest calls
COUNTED = {"schema": "schema_errors", "timeout": "timeouts", "unavailable": "unavailable"}


@dataclass(slots=True)
class _Figures:
    calls: int = 0
    good: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED.values(), 0))
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
            self.counts[COUNTED[result.error]] += 1
        self.cache_hits += result.cached
        if seconds is not None:
            self.times.append(seconds)

    def cut(self, now: float) -> _Figures:
        """What goes on after `now`; this part ends there."""
        if self.running:
            self.busy += now - self.since
        return _Figures(running=self.running, since=now)

    def merge(self, other: _Figures) -> None:
        self.calls += other.calls
        self.good += other.good
        for name, count in other.counts.items():
            self.counts[name] += count
        self.retries += other.retries
        self.cache_hits += other.cache_hits
        self.waited += other.waited
        self.times.extend(other.times)
        self.busy += other.busy

    def named(self, prefix: str, wall: float) -> dict[str, float]:
        """Shares and percentiles over nothing are left out, not zero."""
        named: dict[str, float] = {"calls": self.calls, **self.counts}
        named |= {"retries": self.retries, "cache_hits": self.cache_hits, "waited": self.waited}
        if self.calls:
            named["success"] = self.good / self.calls
        if self.times:
            ordered = sorted(self.times)
            named["p50"], named["p95"] = (ordered[int(len(ordered) * part)] for part in (0.5, 0.95))
        if wall > 0:
            named["wall_share"] = min(1.0, self.busy / wall)
        return {f"{prefix}/{name}": value for name, value in named.items()}


class ToolMetrics:
    """Counts since the last `snapshot`, and since the beginning. Memory is bounded by the number of tools.

    `p50` and `p95` are seconds of calls that were really made, waiting and further attempts included; `waited` are
    seconds spent at limits, `wall_share` is the share of the time in which at least one call was under way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = self._cut = time.perf_counter()
        self._all = _Figures()
        self._tools: dict[str, _Figures] = {}
        self._unread = {"unknown": 0, "malformed": 0}  # calls that belong to no tool
        self._before: dict[str, _Figures] = {}  # what earlier snapshots have taken, by prefix
        self._unread_before = dict(self._unread)

    def began(self, tool: str) -> float:
        """A call of the tool is under way; `finished` must follow. Returns the time."""
        now = time.perf_counter()
        with self._lock:
            self._all.began(now)
            self._of(tool).began(now)
        return now

    def finished(self, tool: str, started: float, result: ToolResult | None) -> None:
        """`result` is None for a call that was broken off."""
        now = time.perf_counter()
        with self._lock:
            made = result is not None and not result.cached and result.error != "schema"
            for figures in (self._all, self._of(tool)):
                figures.finished(now)
                if result is not None:
                    figures.add(result, now - started if made else None)

    def answered(self, tool: str | None, result: ToolResult) -> None:
        """A call that was answered without any tool: unknown, malformed, or replayed."""
        with self._lock:
            if result.error in self._unread:
                self._unread[result.error] += 1
            for figures in (self._all, *([] if tool is None else [self._of(tool)])):
                figures.add(result, None)

    def retried(self, tool: str) -> None:
        with self._lock:
            self._all.retries += 1
            self._of(tool).retries += 1

    def waited(self, tool: str, seconds: float) -> None:
        with self._lock:
            self._all.waited += seconds
            self._of(tool).waited += seconds

    def snapshot(self) -> dict[str, float]:
        """The figures since the last snapshot; a tool that was not called is left out."""
        now = time.perf_counter()
        with self._lock:
            figures, unread = {"tools": self._all}, self._unread
            figures |= {f"tools/{name}": tool for name, tool in self._tools.items()}
            self._all = self._all.cut(now)
            cut = {name: tool.cut(now) for name, tool in self._tools.items()}
            self._tools = {name: tool for name, tool in cut.items() if tool.running}
            self._unread = dict.fromkeys(unread, 0)
            wall, self._cut = now - self._cut, now
            for prefix, part in figures.items():
                self._before.setdefault(prefix, _Figures()).merge(part)
            for name, count in unread.items():
                self._unread_before[name] += count
        return _flat(figures, unread, wall)

    def totals(self) -> dict[str, float]:
        """The figures of the whole run up to the last snapshot."""
        with self._lock:
            return _flat(self._before, self._unread_before, self._cut - self._started)

    def _of(self, tool: str) -> _Figures:
        figures = self._tools.get(tool)
        if figures is None:
            figures = self._tools[tool] = _Figures()
        return figures


def _flat(figures: dict[str, _Figures], unread: dict[str, int], wall: float) -> dict[str, float]:
    named: dict[str, float] = {f"tools/{name}": count for name, count in unread.items()}
    for prefix, part in figures.items():
        if part.calls or prefix == "tools":
            named |= part.named(prefix, wall)
    return named
