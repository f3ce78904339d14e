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
    metrics = calls()
    assert metrics["tools/calls"] == 0
    assert "tools/success" not in metrics and "tools/p50" not in metrics and "tools/act/calls" not in metrics
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
    """The percentiles are those of the latest calls: slow ones that are long past count no more."""
    metrics = ToolMetrics()
    for took in (1000.0, 0.0):
        for _ in range(MAX_TIMES):
            metrics.finished("act", metrics.began("act") - took, ToolResult("a"))
        assert (metrics.totals()["tools/act/p95"] >= 1000) == bool(took)
    assert metrics.totals()["tools/act/calls"] == 2 * MAX_TIMES
