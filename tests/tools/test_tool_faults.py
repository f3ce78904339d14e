"""A campaign of faults: whatever tools do, every call ends in a result or a typed error, and nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.kits.mcp import children, own
from tests.kits.waiting import until, wait_until
from TrainingFactory.tools import AsyncToolExecutor, MCPTools, tool
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult

KINDS = {"schema", "timeout", "exception", "unknown", "malformed", "unavailable", "failed", "tool"}
FAULTS = ["fine"] * 5 + ["raise", "hang", "junk", "large", "late", "wrong", "unknown", "malformed"]
GUARD = 120.0  # seconds; far more than any call here may take
MAX_CHARS = 2000


def in_process(let_go: threading.Event) -> list[Any]:
    """The same faults in a function on the event loop and in one that blocks a thread."""

    def fault(what: str, number: int) -> Any:
        if what == "raise":
            raise random.Random(number).choice(
                [RuntimeError, KeyError, StopIteration, SystemExit, MemoryError]
            )(number)
        if what == "close":
            raise asyncio.CancelledError if number % 2 else ConnectionResetError("by peer")
        if what == "junk":
            nested: Any = "deep"
            for _ in range(number % 3 * 1000):
                nested = [nested]
            return {b"\xff": object(), number: float("nan"), "text": "\ud800", "nested": nested}
        return f"{number} " + "x" * (10_000_000 if what == "large" else 0)

    @tool(name="quick", pure=True, concurrency=8)
    async def on_loop(what: str, number: int) -> Any:
        """On the event loop."""
        if what in ("hang", "late"):
            await asyncio.sleep(1000 if what == "hang" else 0.05)
        return fault(what, number)

    @tool(name="thread", server="there")
    def on_thread(what: str, number: int) -> Any:
        """On a thread."""
        if what in ("hang", "late"):
            let_go.wait(1000 if what == "hang" else 0.05)
        return fault(what, number)

    return [on_loop, on_thread]


def planned(count: int, names: list[str], seed: int, faults: list[str]) -> list[ToolCall]:
    chance = random.Random(seed)
    calls = []
    for number in range(count):
        what, name = chance.choice(faults), chance.choice(names)
        arguments = {"what": what, "number": "seven" if what == "wrong" else number}
        broken = "the call cannot be read" if what == "malformed" else None
        calls.append(ToolCall("nobody" if what == "unknown" else name, arguments, str(number), broken))
    return calls


async def episode(executor: AsyncToolExecutor, calls: list[ToolCall], width: int) -> list[ToolResult]:
    """Turns of `width` calls; an episode whose tools are gone ends."""
    results: list[ToolResult] = []
    try:
        for start in range(0, len(calls), width):
            turn = await executor.batch_execute(calls[start : start + width])
            results += turn
            if any(result.error == "unavailable" for result in turn):
                await asyncio.sleep(2.0)  # or all calls would fall into the same pause of the server
    except ToolFailure as failure:
        results += [
            ToolResult(str(failure), ok=False, error="unavailable", id=c.id) for c in calls[len(results) :]
        ]
    finally:
        await executor.close()
    return results


def campaign(
    make: Callable[[], list[Any]], calls: list[ToolCall], timeout: float, source: MCPTools | None = None
) -> list[ToolResult]:
    """All calls in eight episodes at once, twice over in event loops of their own."""

    async def batch(part: list[ToolCall]) -> list[ToolResult]:
        runtime = ToolRuntime(deadline=15.0)
        if source is not None:
            await source.open()
        executors = [AsyncToolExecutor(make(), timeout, MAX_CHARS) for _ in range(8)]
        for number, executor in enumerate(executors):
            executor.attach(runtime, number)
        size = -(-len(part) // 8)
        shares = [part[start : start + size] for start in range(0, len(part), size)]
        done = await asyncio.gather(*(episode(e, c, 5) for e, c in zip(executors, shares, strict=False)))
        if source is not None:
            await kept_up(source)
            await source.close()
        async with asyncio.timeout(GUARD):  # or tasks are left
            while asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0.01)
        assert 0 < runtime.snapshot()["tools/calls"] <= len(part)
        return [result for share in done for result in share]

    half = len(calls) // 2
    return asyncio.run(batch(calls[:half])) + asyncio.run(batch(calls[half:]))


async def kept_up(source: MCPTools) -> None:
    """Wait until the server is back."""

    async def answers() -> bool:
        [result] = await AsyncToolExecutor([source]).batch_execute(
            [ToolCall("act", {"what": "fine", "number": 1})]
        )
        return result.content == "1"

    await until(answers)


def check(calls: list[ToolCall], results: list[ToolResult]) -> Counter[str]:
    """Order, kinds and sizes. Returns how the calls ended."""
    assert [result.id for result in results] == [call.id for call in calls]
    for call, result in zip(calls, results, strict=True):
        what = call.arguments["what"]
        assert result.ok or result.error in KINDS, (what, result)
        assert len(result.content) < MAX_CHARS + 100 and result.seconds < GUARD, (what, result)
        result.content.encode()
        if result.ok and what != "junk":
            assert result.content.split()[0] == call.id, (what, result.content[:100])
        if what in ("hang", "raise", "wrong", "unknown", "malformed", "close"):
            assert not result.ok, (what, result.content)
    return Counter(result.error or "ok" for result in results)


def held() -> tuple[int, int, set[int]]:
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name != "tool"]  # those are kept
    return len(threads), psutil.Process().num_fds(), children()


def nothing_more_than(before: tuple[int, int, set[int]]) -> bool:
    now = held()
    return now[0] <= before[0] and now[1] <= before[1] and now[2] <= before[2]


def run_in_process(count: int) -> Counter[str]:
    let_go = threading.Event()
    before = held()
    calls = planned(count, ["quick", "thread"], 1, [*FAULTS, "close"])
    try:
        ended = check(calls, campaign(lambda: in_process(let_go), calls, 0.25))
    finally:
        let_go.set()
    wait_until(lambda: nothing_more_than(before))
    return ended


def run_mcp(count: int, crashes: int, large: int, timeout: float) -> Counter[str]:
    before = held()
    calls = planned(count, ["act"], 2, [fault for fault in FAULTS if fault != "large"])
    # Starting a process takes a second and 10 MB over stdio take several, so these are counted out.
    costly = ["close"] * crashes + ["large"] * large
    random.Random(3).shuffle(costly)
    for place, what in enumerate(costly, 1):
        number = place * count // (len(costly) + 1)
        calls[number] = ToolCall("act", {"what": what, "number": number}, str(number))
    source = MCPTools.from_dict({"mcpServers": {"faulty": own("faulty.py")}})
    ended = check(calls, campaign(lambda: [source], calls, timeout, source))
    wait_until(lambda: nothing_more_than(before))
    return ended


def test_faults_of_functions():
    ended = run_in_process(150)
    assert {"ok", "timeout", "exception", "schema", "unknown", "malformed"} <= ended.keys(), ended


@pytest.mark.skipif(sys.platform == "win32", reason="counts file handles as on Unix")
def test_faults_of_an_mcp_server():
    ended = run_mcp(80, crashes=1, large=0, timeout=1.5)
    assert {"ok", "timeout", "unavailable", "schema", "unknown", "malformed"} <= ended.keys(), ended


@pytest.mark.slow
def test_a_thousand_faults_of_functions():
    assert sum(run_in_process(1000).values()) == 1000


@pytest.mark.slow
def test_a_thousand_faults_of_an_mcp_server():
    ended = run_mcp(1000, crashes=10, large=5, timeout=8.0)
    assert sum(ended.values()) == 1000 and ended["ok"] > 100, ended
