"""Metrics of the tool calls of a run, per tool and in total. Counts belong to the episode that made the calls, so a
training step reports the calls of its own episodes, even if they were sampled earlier."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from TrainingFactory.types import ToolResult

MAX_DURATIONS = 4096  # most recent call durations kept for the percentiles
MAX_EPISODES = 50_000  # episodes with counts since the last snapshot; the oldest are dropped
METRIC_BY_ERROR = {"schema": "schema_errors", "timeout": "timeouts", "unavailable": "unavailable"}
NO_TOOL_METRICS = {"unknown": "unknown", "malformed": "malformed"}  # errors of calls that belong to no tool
ALL_TOOLS = ""  # key of the counts over all tools


@dataclass(slots=True)
class _CallCounts:
    """Counts of one tool, or of all tools."""

    num_calls: int = 0
    num_succeeded: int = 0
    errors: Counter[str | None] = field(default_factory=Counter)
    num_retries: int = 0
    num_cache_hits: int = 0
    wait_seconds: float = 0.0
    call_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DURATIONS))

    def add_call(self, result: ToolResult, seconds: float | None) -> None:
        self.num_calls += 1
        self.num_succeeded += result.ok
        self.errors[result.error] += 1
        self.num_cache_hits += result.cached
        if seconds is not None:
            self.call_seconds.append(seconds)

    def merge(self, other_counts: _CallCounts) -> None:
        self.num_calls += other_counts.num_calls
        self.num_succeeded += other_counts.num_succeeded
        self.errors.update(other_counts.errors)
        self.num_retries += other_counts.num_retries
        self.num_cache_hits += other_counts.num_cache_hits
        self.wait_seconds += other_counts.wait_seconds
        self.call_seconds.extend(other_counts.call_seconds)

    def to_metrics(self, tool_name: str) -> dict[str, float]:
        """Return the metrics by name; omit the percentiles if there are no durations."""
        error_metrics = METRIC_BY_ERROR if tool_name else METRIC_BY_ERROR | NO_TOOL_METRICS
        metrics: dict[str, float] = {name: self.errors[error] for error, name in error_metrics.items()}
        metrics |= {"calls": self.num_calls, "retries": self.num_retries, "cache_hits": self.num_cache_hits}
        metrics |= {"waited": self.wait_seconds, "success": self.num_succeeded / self.num_calls}
        if self.call_seconds:
            sorted_seconds = sorted(self.call_seconds)
            metrics["p50"] = sorted_seconds[int(len(sorted_seconds) * 0.5)]
            metrics["p95"] = sorted_seconds[int(len(sorted_seconds) * 0.95)]
        return {_make_prefix(tool_name) + name: value for name, value in metrics.items()}


@dataclass(slots=True)
class _Timer:
    """Measures the seconds during which at least one call of a tool was in flight."""

    busy_seconds: float = 0.0  # up to `updated_at`
    num_running: int = 0
    updated_at: float = 0.0

    def update(self, change: int, now: float) -> None:
        if self.num_running:
            self.busy_seconds += now - self.updated_at
        self.num_running += change
        self.updated_at = now

    def take_busy_seconds(self, now: float) -> float:
        """Return the busy seconds since the previous call."""
        self.update(0, now)
        seconds, self.busy_seconds = self.busy_seconds, 0.0
        return seconds


class ToolMetrics:
    """Holds the counts of every episode until `snapshot` or `drop` removes them, and the totals of the run."""

    def __init__(self) -> None:
        self._last_snapshot_time = time.perf_counter()
        self._timers: defaultdict[str, _Timer] = defaultdict(_Timer)
        self._counts_by_episode: dict[Hashable, defaultdict[str, _CallCounts]] = {}
        self._total_counts: defaultdict[str, _CallCounts] = defaultdict(_CallCounts)

    def start_call(self, tool_name: str) -> float:
        """Record that a call of the tool started; `finish_call` must follow. Return the start time."""
        now = time.perf_counter()
        self._update_timers(tool_name, 1, now)
        return now

    def finish_call(
        self, tool_name: str, start_time: float, result: ToolResult | None, episode_key: Hashable = None
    ) -> None:
        """Count a call; `result` is None if it was cancelled."""
        now = time.perf_counter()
        self._update_timers(tool_name, -1, now)
        if result is not None:
            was_executed = not result.cached and result.error != "schema"
            for counts in self._get_counts(episode_key, ALL_TOOLS, tool_name):
                counts.add_call(result, now - start_time if was_executed else None)

    def count_answer(self, tool_name: str | None, result: ToolResult, episode_key: Hashable = None) -> None:
        """Count a call that no tool executed: an unknown tool, a malformed call, or a replayed one."""
        for counts in self._get_counts(episode_key, ALL_TOOLS, *([] if tool_name is None else [tool_name])):
            counts.add_call(result, None)

    def count_retry(self, tool_name: str, episode_key: Hashable = None) -> None:
        for counts in self._get_counts(episode_key, ALL_TOOLS, tool_name):
            counts.num_retries += 1

    def count_wait(self, tool_name: str, seconds: float, episode_key: Hashable = None) -> None:
        for counts in self._get_counts(episode_key, ALL_TOOLS, tool_name):
            counts.wait_seconds += seconds

    def snapshot(self, selects: Callable[[Any], bool] = lambda _: True) -> dict[str, float]:
        """Return the metrics of the episodes whose key `selects` accepts, and remove their counts. `wall_share` covers
        the time since the previous snapshot."""
        total_counts: defaultdict[str, _CallCounts] = defaultdict(_CallCounts)
        for episode_key in [key for key in list(self._counts_by_episode) if selects(key)]:
            for tool_name, counts in self._counts_by_episode.pop(episode_key).items():
                total_counts[tool_name].merge(counts)
        now, previous_time = time.perf_counter(), self._last_snapshot_time
        self._last_snapshot_time = now
        busy_seconds = {tool_name: timer.take_busy_seconds(now) for tool_name, timer in self._timers.items()}
        return _make_metrics(total_counts) | {
            f"{_make_prefix(tool_name)}wall_share": min(1.0, seconds / (now - previous_time))
            for tool_name, seconds in busy_seconds.items()
            if total_counts[tool_name].num_calls and now > previous_time
        }

    def drop(self, selects: Callable[[Any], bool]) -> None:
        """Discard the counts of the episodes whose key `selects` accepts."""
        for episode_key in list(self._counts_by_episode):
            if selects(episode_key):
                del self._counts_by_episode[episode_key]

    def get_totals(self) -> dict[str, float]:
        """Return the metrics of the whole run."""
        return _make_metrics(self._total_counts)

    def _get_counts(self, episode_key: Hashable, *tool_names: str) -> list[_CallCounts]:
        episode_counts = self._counts_by_episode.get(episode_key)
        if episode_counts is None:
            if len(self._counts_by_episode) >= MAX_EPISODES:
                del self._counts_by_episode[next(iter(self._counts_by_episode))]
            episode_counts = self._counts_by_episode[episode_key] = defaultdict(_CallCounts)
        return [counts[name] for counts in (episode_counts, self._total_counts) for name in tool_names]

    def _update_timers(self, tool_name: str, change: int, now: float) -> None:
        for key in (ALL_TOOLS, tool_name):
            self._timers[key].update(change, now)


def _make_prefix(tool_name: str) -> str:
    return f"tools/{tool_name}/" if tool_name else "tools/"


def _make_metrics(counts_by_tool: defaultdict[str, _CallCounts]) -> dict[str, float]:
    """Return the metrics by name, without tools that were not called."""
    metrics: dict[str, float] = {}
    for tool_name in (ALL_TOOLS, *filter(None, list(counts_by_tool))):
        if counts_by_tool[tool_name].num_calls:
            metrics |= counts_by_tool[tool_name].to_metrics(tool_name)
    return metrics
