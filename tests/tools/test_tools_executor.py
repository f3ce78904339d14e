from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from contextvars import ContextVar
from typing import Any

import pytest

from tests.kits.tools import execute, one
from TrainingFactory.common.event_loop import call_in_thread
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools.custom_tools import calculator
from TrainingFactory.tools.timeouts import never_waits, run_within
from TrainingFactory.types import Task, ToolCall, ToolFailure, ToolResult


def test_results_are_in_call_order_and_run_together():
    together = threading.Barrier(3, timeout=10)

    @tool
    def wait(label: str, seconds: float) -> str:
        together.wait()  # passes only if all three run at the same time
        time.sleep(seconds)
        return label

    calls = [ToolCall("wait", {"label": str(i), "seconds": 0.1 * (2 - i)}) for i in range(3)]
    assert [result.content for result in execute([wait], *calls)] == ["0", "1", "2"]


def test_unknown_and_malformed_calls():
    @tool
    def search(query: str) -> str:
        return query

    unknown, malformed = execute(
        [search, calculator], ToolCall("calculater", {}), ToolCall("", error="no JSON in the call")
    )
    assert unknown.error == "unknown" and not unknown.ok
    assert "'calculater'" in unknown.content and "calculator, search" in unknown.content
    assert malformed == ToolResult("no JSON in the call", ok=False, error="malformed")
    assert "no tools here" in execute([], ToolCall("x" * 1000))[0].content
    assert len(execute([search], ToolCall("x" * 100_000))[0].content) < 200


class Nasty(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad\n  city"),
        StopIteration("x"),
        SystemExit(1),
        asyncio.CancelledError(),
        TimeoutError(),
        Nasty(),
    ],
)
def test_exceptions_become_results(error: BaseException, is_async: bool, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)

    @tool(name="broken")
    def blocking() -> str:
        raise error

    @tool(name="broken")
    async def on_loop() -> str:
        raise error

    result, after = execute(
        [on_loop if is_async else blocking, calculator],
        ToolCall("broken"),
        ToolCall("calculator", {"expression": "1+1"}),
    )
    assert result.error == "exception" and not result.ok
    assert result.content.startswith("broken failed: ")
    assert "Traceback" not in result.content and "\n" not in result.content
    assert after.content == "2"
    assert "Traceback" in caplog.text
    if isinstance(error, Nasty):
        assert result.content == "broken failed: Nasty"
    if isinstance(error, ValueError):
        assert result.content == "broken failed: ValueError: bad city"


def test_tool_failure_is_raised_after_the_others_have_ended():
    ended: list[str] = []

    @tool
    async def gone() -> str:
        raise ToolFailure("the sandbox died")

    @tool
    async def slow() -> str:
        await asyncio.sleep(0.05)
        ended.append("slow")
        return ""

    with pytest.raises(ToolFailure, match="sandbox"):
        execute([gone, slow], ToolCall("gone"), ToolCall("slow"))
    assert ended == ["slow"]


def test_a_call_out_of_time():
    let_go = threading.Event()

    @tool(timeout=0.05)
    def hung() -> str:
        let_go.wait(30)
        return ""

    @tool(timeout=0.05)
    async def hung_async() -> str:
        await asyncio.sleep(30)
        return ""

    results = execute(
        [hung, hung_async, calculator],
        ToolCall("hung"),
        ToolCall("hung_async"),
        ToolCall("calculator", {"expression": "2*3"}),
    )
    let_go.set()
    assert [result.error for result in results] == ["timeout", "timeout", None]
    assert results[0].content == "hung took longer than 0.05 s and was stopped"
    assert results[2].content == "6"


async def test_an_async_tool_that_ignores_its_cancelling_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("TrainingFactory.tools.timeouts.GRACE_SECONDS", 0.05)
    go_on = True

    @tool(timeout=0.05)
    async def stubborn() -> str:
        while go_on:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return ""

    results = await AsyncToolExecutor([stubborn]).batch_execute([ToolCall("stubborn")])
    go_on = False
    assert results[0].error == "timeout"


def test_hung_tools_hold_up_neither_other_tools_nor_the_exit():
    """More hung threads than any fixed pool has, then a call that works, then the end of the program."""
    program = """
        import asyncio, time
        from TrainingFactory.tools import AsyncToolExecutor, tool
        from TrainingFactory.types import ToolCall

        @tool(timeout=0.2)
        def hung() -> str:
            time.sleep(1000)

        @tool
        def fine() -> str:
            return "fine"

        async def main():
            executor = AsyncToolExecutor([hung, fine])
            await executor.batch_execute([ToolCall("hung")] * 50)
            print((await executor.batch_execute([ToolCall("fine")]))[0].content)

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "fine\n" and done.returncode == 0, done.stderr


def test_a_result_that_comes_after_the_loop_is_closed_is_dropped():
    jobs: list[Any] = []

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call_in_thread(jobs.append, lambda: "too late"), 0.01)

    asyncio.run(main())
    jobs[0]()


def test_large_and_odd_outputs():
    @tool
    def large() -> str:
        return "head" + "x" * 10_000_000 + "tail"

    @tool
    def odd() -> str:
        return "a\ud800b"

    @tool
    async def own() -> ToolResult:
        return ToolResult("no such city", ok=False, error="failed")

    result = one(large, max_output_chars=1000)
    assert len(result.content) < 1100
    assert result.content.startswith("headx") and result.content.endswith("xtail")
    assert "[... 9999008 characters cut ...]" in result.content
    assert one(odd).content.encode() == b"a?b"
    assert one(own).content == "no such city" and one(own).error == "failed" and one(own).seconds > 0


async def _finished(value: int) -> int:
    return value


def test_only_functions_without_await_are_said_never_to_wait():
    async def waits() -> None:
        await asyncio.sleep(0)

    async def enters(lock: asyncio.Lock) -> None:
        async with lock:
            pass

    async def loops(items: Any) -> list[int]:
        return [item async for item in items]

    async def several() -> list[int]:
        return [await _finished(number) for number in range(2)]

    async def yields() -> Any:
        yield 1

    own = (_finished, calculator.function, ToolEnvironment(Task("a", "b")).close)
    assert all(never_waits(function.__code__) for function in own)
    others = (waits, enters, loops, several, yields, lambda: _finished(1))
    assert not any(never_waits(function.__code__) for function in others)


async def test_a_tool_that_never_waits_needs_no_task_and_fails_as_others_do():
    """What it sets in its context stays its own, and whatever it raises is a result."""
    inside: ContextVar[str] = ContextVar("inside", default="")
    seen: list[Any] = []

    @tool
    async def act(what: str) -> str:
        seen.append((asyncio.current_task(), inside.get()))
        inside.set(what)
        if what == "cancel":
            raise asyncio.CancelledError
        if what == "exit":
            raise SystemExit
        return what

    executor = AsyncToolExecutor([act])
    found = []
    for what in ("cancel", "exit", "fine"):
        found += await executor.batch_execute([ToolCall("act", {"what": what})])
    assert [*seen] == [(asyncio.current_task(), "")] * 3
    cancelled, ended, fine = found
    assert not cancelled.ok and "it cancelled itself" in cancelled.content
    assert not ended.ok and "tried to end the program" in ended.content
    assert fine.ok and fine.content == "fine"


def test_what_a_bounded_call_raises_holds_nothing_when_it_was_handled() -> None:
    """Or every episode would stay until garbage is collected, which takes longer the more there is."""
    seen: list[weakref.ref[threading.Event]] = []

    async def raises() -> None:
        held = threading.Event()
        seen.append(weakref.ref(held))
        await asyncio.sleep(0)
        raise ValueError

    async def handled() -> None:
        with contextlib.suppress(ValueError):
            await run_within(5, raises())
        assert seen[0]() is None

    gc.disable()
    try:
        asyncio.run(handled())
    finally:
        gc.enable()
