from __future__ import annotations

import asyncio

import pytest

from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools.metrics import MAX_DURATIONS, ToolMetrics
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import ToolCall, ToolResult


@tool(timeout=0.05)
async def act(what: str) -> str:
    """Do it."""
    if what == "hang":
        await asyncio.sleep(30)
    if what == "fail":
        raise ValueError("no")
    return what


def test_metrics_of_a_step_and_of_the_run():
    runtime = ToolRuntime()

    def calls(*calls: ToolCall) -> dict[str, float]:
        executor = AsyncToolExecutor([act])
        executor.attach(runtime, "0/a/0")
        asyncio.run(executor.batch_execute(calls))
        return runtime.snapshot()

    metrics = calls(
        ToolCall("act", {"what": "a"}),
        ToolCall("act", {"what": "hang"}),
        ToolCall("act", {"what": "fail"}),
        ToolCall("act", {"what": 3}),
        ToolCall("nothing"),
        ToolCall("", error="unreadable"),
    )
    assert metrics["tools/calls"] == 6 and metrics["tools/act/calls"] == 4
    assert metrics["tools/success"] == 1 / 6 and metrics["tools/act/success"] == 1 / 4
    for name in ("schema_errors", "timeouts"):
        assert metrics[f"tools/{name}"] == metrics[f"tools/act/{name}"] == 1
    assert metrics["tools/unknown"] == metrics["tools/malformed"] == 1
    assert 0 < metrics["tools/act/p50"] <= metrics["tools/act/p95"]
    assert metrics["tools/p95"] >= 0.05  # the call that hung
    assert 0 < metrics["tools/wall_share"] <= 1
    assert all(isinstance(value, int | float) for value in metrics.values())

    metrics = calls(ToolCall("act", {"what": "b"}))
    assert metrics["tools/calls"] == 1 and metrics["tools/success"] == 1 and metrics["tools/timeouts"] == 0
    assert calls() == {}  # zeros would stand beside the tool calls of every run without tools
    totals = runtime.metrics.get_totals()
    assert totals["tools/calls"] == 7 and totals["tools/act/calls"] == 5 and totals["tools/timeouts"] == 1


def test_a_call_that_spans_a_snapshot_is_counted_once():
    metrics = ToolMetrics()
    started = metrics.start_call("act")
    assert metrics.snapshot() == {}
    metrics.finish_call("act", started, ToolResult("a"))
    spanned = metrics.snapshot()
    assert spanned["tools/act/calls"] == 1 and spanned["tools/wall_share"] > 0
    metrics.finish_call("act", metrics.start_call("act"), None)  # broken off: no call that ended
    assert metrics.snapshot() == {}


def test_calls_are_counted_for_the_episodes_that_made_them():
    """Whenever they were made: a step trains episodes that were played while another one was trained."""
    runtime = ToolRuntime()
    for episode, times in (("first", 2), ("second", 3), ("given up", 1)):
        executor = AsyncToolExecutor([act])
        executor.attach(runtime, episode)
        asyncio.run(executor.batch_execute([ToolCall("act", {"what": "a"}), ToolCall("nothing")] * times))
    runtime.metrics.drop(lambda episode: episode == "given up")
    second = runtime.snapshot(lambda episode: episode == "second")
    assert second["tools/calls"] == 6 and second["tools/act/calls"] == second["tools/unknown"] == 3
    assert runtime.snapshot()["tools/calls"] == 4 and runtime.snapshot() == {}
    assert runtime.metrics.get_totals()["tools/calls"] == 12


def test_memory_is_bounded():
    """The percentiles are those of the latest calls: slow ones that are long past count no more."""
    metrics = ToolMetrics()
    for took in (1000.0, 0.0):
        for _ in range(MAX_DURATIONS):
            metrics.finish_call("act", metrics.start_call("act") - took, ToolResult("a"))
        assert (metrics.get_totals()["tools/act/p95"] >= 1000) == bool(took)
    assert metrics.get_totals()["tools/act/calls"] == 2 * MAX_DURATIONS


def test_episodes_that_nobody_reports_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("TrainingFactory.tools.metrics.MAX_EPISODES", 3)
    metrics = ToolMetrics()
    for episode in range(5):
        metrics.count_answer("act", ToolResult("a"), episode)
    assert metrics.snapshot(lambda episode: episode < 2) == {} and metrics.snapshot()["tools/calls"] == 3
