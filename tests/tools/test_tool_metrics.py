from __future__ import annotations

import asyncio

from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools.metrics import MAX_TIMES, ToolMetrics
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


def test_figures_of_a_step_and_of_the_run():
    runtime = ToolRuntime()

    def calls(*calls: ToolCall) -> dict[str, float]:
        executor = AsyncToolExecutor([act])
        executor.attach(runtime, "0/a/0")
        asyncio.run(executor.batch_execute(calls))
        return runtime.snapshot()

    figures = calls(
        ToolCall("act", {"what": "a"}),
        ToolCall("act", {"what": "hang"}),
        ToolCall("act", {"what": "fail"}),
        ToolCall("act", {"what": 3}),
        ToolCall("nothing"),
        ToolCall("", error="unreadable"),
    )
    assert figures["tools/calls"] == 6 and figures["tools/act/calls"] == 4
    assert figures["tools/success"] == 1 / 6 and figures["tools/act/success"] == 1 / 4
    for name in ("schema_errors", "timeouts"):
        assert figures[f"tools/{name}"] == figures[f"tools/act/{name}"] == 1
    assert figures["tools/unknown"] == figures["tools/malformed"] == 1
    assert 0 < figures["tools/act/p50"] <= figures["tools/act/p95"]
    assert figures["tools/p95"] >= 0.05  # the call that hung
    assert 0 < figures["tools/wall_share"] <= 1
    assert all(isinstance(value, int | float) for value in figures.values())

    figures = calls(ToolCall("act", {"what": "b"}))
    assert figures["tools/calls"] == 1 and figures["tools/success"] == 1 and figures["tools/timeouts"] == 0
    figures = calls()
    assert figures["tools/calls"] == 0
    assert "tools/success" not in figures and "tools/p50" not in figures and "tools/act/calls" not in figures
    totals = runtime.metrics.totals()
    assert totals["tools/calls"] == 7 and totals["tools/act/calls"] == 5 and totals["tools/timeouts"] == 1
    assert 0 < totals["tools/wall_share"] <= 1


def test_a_call_that_spans_a_snapshot_is_counted_once():
    metrics = ToolMetrics()
    started = metrics.began("act")
    first = metrics.snapshot()
    assert first["tools/calls"] == 0 and first["tools/wall_share"] > 0
    metrics.finished("act", started, ToolResult("a"))
    assert metrics.snapshot()["tools/act/calls"] == 1
    metrics.finished("act", metrics.began("act"), None)  # broken off: no call that ended
    assert metrics.snapshot()["tools/calls"] == 0


def test_memory_is_bounded():
    metrics = ToolMetrics()
    for _ in range(3):
        for _ in range(MAX_TIMES):
            metrics.finished("act", metrics.began("act"), ToolResult("a"))
        metrics.snapshot()
    assert len(metrics._before["tools/act"].times) == MAX_TIMES
    assert metrics.totals()["tools/act/calls"] == 3 * MAX_TIMES
