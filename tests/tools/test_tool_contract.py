"""What holds for every call: order, limits, time, further attempts, circuits."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.tools import execute, one
from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools import runtime as runtime_module
from TrainingFactory.tools.limits import CircuitBreaker
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult, ToolSpec


class Scripted:
    """A tool that answers what the script says, one entry per call; an exception is raised."""

    def __init__(self, script: list[Any], name: str = "scripted", **options: Any) -> None:
        self.spec = ToolSpec(name)
        self.options = ToolOptions(**options)
        self.script = script
        self.calls = 0

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        self.calls += 1
        answer = self.script[min(self.calls, len(self.script)) - 1]
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, ToolResult) else ToolResult(str(answer))


class NoSuchCity(Exception): ...


class TransportError(Exception):
    """As in httpx."""


class ReadError(TransportError): ...


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "FIRST_PAUSE_SECONDS", 0.001)


def attached(tools: list[Any], runtime: ToolRuntime, key: str = "0/a/0", **options: Any) -> AsyncToolExecutor:
    executor = AsyncToolExecutor(tools, **options)
    executor.attach(runtime, key)
    return executor


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["free", "ordered", "gone", "bad"])), max_size=12)
)
def test_results_have_the_order_and_the_ids_of_their_calls(plan: list[tuple[int, str]]):
    made: list[int] = []

    @tool
    async def free(number: int, rounds: int) -> str:
        for _ in range(rounds):
            await asyncio.sleep(0)
        return str(number)

    @tool(ordered=True)
    async def ordered(number: int, rounds: int) -> str:
        for _ in range(rounds):
            await asyncio.sleep(0)
        made.append(number)
        return str(number)

    calls = [
        ToolCall(
            "free" if kind == "bad" else kind,
            {"number": "x" if kind == "bad" else number, "rounds": rounds},
            id=f"call_{number}",
        )
        for number, (rounds, kind) in enumerate(plan)
    ]
    results = execute([free, ordered], *calls)
    assert [result.id for result in results] == [call.id for call in calls]
    for number, ((_, kind), result) in enumerate(zip(plan, results, strict=True)):
        if kind in ("free", "ordered"):
            assert result.ok and result.content == str(number)
        else:
            assert result.error == {"gone": "unknown", "bad": "schema"}[kind]
    assert made == [number for number, (_, kind) in enumerate(plan) if kind == "ordered"]


def test_a_limit_holds_over_all_episodes_and_batches():
    inside, most = 0, 0

    @tool(concurrency=2)
    async def search() -> str:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.005)
        inside -= 1
        return ""

    runtime = ToolRuntime()

    async def episodes() -> list[list[ToolResult]]:
        executors = [attached([search], runtime, f"0/a/{member}") for member in range(4)]
        return await asyncio.gather(*(each.batch_execute([ToolCall("search")] * 3) for each in executors))

    for _ in range(2):  # each in an event loop of its own
        assert all(result.ok for batch in asyncio.run(episodes()) for result in batch)
    assert most == 2
    assert runtime.snapshot()["tools/search/waited"] > 0


@pytest.mark.parametrize("has_an_end", [False, True])
async def test_waiting_at_a_limit_is_no_time_out_but_has_an_end(has_an_end: bool):
    inside, release = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        inside.set()
        await release.wait()
        return "done"

    runtime = ToolRuntime(deadline=0.2 if has_an_end else 240)
    holder, waiter = (
        attached([tool(concurrency=1, timeout=timeout)(slow)], runtime) for timeout in (600, 0.1)
    )
    held = asyncio.create_task(holder.batch_execute([ToolCall("slow")]))
    await inside.wait()
    waiting = asyncio.create_task(waiter.batch_execute([ToolCall("slow")]))
    if has_an_end:
        await waiting
    else:
        await asyncio.sleep(0.2)  # longer than its time-out
    release.set()
    assert (await held)[0].content == "done"
    result = (await waiting)[0]
    if has_an_end:
        assert result.error == "unavailable" and "in use by others" in result.content
    else:
        assert result.content == "done"


def test_an_attempt_that_is_not_made_hides_nothing(monkeypatch: pytest.MonkeyPatch):
    """Time runs out between two attempts: the result is that of the first."""
    ahead = 0.0
    monkeypatch.setattr(runtime_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))
    runtime = ToolRuntime()

    def retried(*_: object) -> None:
        nonlocal ahead
        ahead = 1e6

    monkeypatch.setattr(runtime.metrics, "count_retry", retried)
    scripted = Scripted([ConnectionError("by peer"), "fine"], pure=True)
    [result] = asyncio.run(attached([scripted], runtime).batch_execute([ToolCall("scripted")]))
    assert scripted.calls == 1 and result.error == "exception" and "by peer" in result.content


@pytest.mark.parametrize(
    ("script", "options", "calls", "ok"),
    [
        ([ConnectionError("x"), "fine"], {"idempotent": True}, 2, True),
        ([ConnectionError("x"), OSError("y"), "fine"], {"pure": True}, 3, True),
        ([ConnectionError("x")], {"pure": True}, 3, False),
        ([ConnectionError("x")], {"pure": True, "retries": 0}, 1, False),
        ([ConnectionError("x"), "fine"], {}, 1, False),
        ([ConnectionError("x"), "fine"], {"stateful": True}, 1, False),
        ([ToolResult("down", ok=False, error="unavailable"), "fine"], {"pure": True}, 2, True),
        ([ToolResult("no such city", ok=False, error="failed"), "fine"], {"pure": True}, 1, False),
        ([ValueError("bad city"), "fine"], {"pure": True}, 1, False),
        ([NoSuchCity("bad city"), "fine"], {"pure": True}, 1, False),
        ([FileNotFoundError("bad path"), "fine"], {"pure": True}, 1, False),
        ([ReadError("lost"), "fine"], {"pure": True}, 2, True),
        ([ExceptionGroup("x", [EOFError()]), "fine"], {"pure": True}, 2, True),
        ([ExceptionGroup("x", [NoSuchCity()]), "fine"], {"pure": True}, 1, False),
        ([ToolResult("wrong", ok=False, error="schema"), "fine"], {"pure": True}, 1, False),
    ],
)
def test_only_repeatable_tools_are_tried_again_and_only_where_it_can_help(
    script: list[Any], options: dict[str, Any], calls: int, ok: bool
):
    scripted, runtime = Scripted(script, **options), ToolRuntime()
    [result] = asyncio.run(attached([scripted], runtime).batch_execute([ToolCall("scripted")]))
    assert (scripted.calls, result.ok) == (calls, ok)
    metrics = runtime.snapshot()
    assert metrics["tools/scripted/retries"] == metrics["tools/retries"] == calls - 1
    assert metrics["tools/calls"] == 1


def test_a_time_out_is_tried_again():
    @tool(timeout=0.05, pure=True, retries=3)
    async def hung() -> str:
        await asyncio.sleep(600)
        return ""

    runtime = ToolRuntime()
    [result] = asyncio.run(attached([hung], runtime).batch_execute([ToolCall("hung")]))
    assert result.error == "timeout" and runtime.snapshot()["tools/retries"] == 3


def test_pauses_leave_the_seeded_random_numbers_alone():
    random.seed(7)
    before = random.getstate()
    one(Scripted([OSError()], pure=True))
    assert random.getstate() == before


async def test_a_server_that_is_down_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(runtime_module, "CircuitBreaker", lambda: CircuitBreaker(clock=lambda: now))
    down = ToolResult("gone", ok=False, error="unavailable")
    first = Scripted([ConnectionError("refused"), down], "first", server="shop")
    second = Scripted(["fine"], "second", server="shop")
    other = Scripted(["fine"], "other", server="bank")
    runtime = ToolRuntime()
    executor = attached([first, second, other], runtime)
    for _ in range(3):
        await executor.batch_execute([ToolCall("first")])
    turned_away, elsewhere = await executor.batch_execute([ToolCall("second"), ToolCall("other")])
    assert turned_away.error == "unavailable" and "not available at the moment" in turned_away.content
    assert second.calls == 0 and elsewhere.ok
    now = 2.0  # the pause is over
    for _ in range(2):
        assert (await executor.batch_execute([ToolCall("second")]))[0].ok
    assert runtime.snapshot()["tools/unavailable"] == 3


@pytest.mark.parametrize(
    "answer",
    [ToolResult("no such shop", ok=False, error="failed"), ValueError("no shop"), NoSuchCity("no shop")],
)
async def test_a_server_that_answers_with_errors_is_not_down(answer: Any):
    scripted = Scripted([answer], server="shop")
    executor = attached([scripted], ToolRuntime())
    for _ in range(10):  # one after another: those that fail together count as one
        await executor.batch_execute([ToolCall("scripted")])
    assert scripted.calls == 10


async def test_tool_failure_and_cancelling_leave_nothing_behind():
    let_in = 0

    @tool(concurrency=1)
    async def gone(fails: bool, hangs: bool = False) -> str:
        nonlocal let_in
        let_in += 1
        if fails:
            raise ToolFailure("the sandbox died")
        await asyncio.sleep(30 if hangs else 0)
        return "fine"

    runtime = ToolRuntime(deadline=5)
    with pytest.raises(ToolFailure, match="sandbox"):
        await attached([gone], runtime).batch_execute([ToolCall("gone", {"fails": True})] * 2)
    hanging = [ToolCall("gone", {"fails": False, "hangs": True})] * 3
    batch = asyncio.create_task(attached([gone], runtime).batch_execute(hanging))
    async with asyncio.timeout(30):
        while let_in < 3:
            await asyncio.sleep(0)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    assert asyncio.all_tasks() == {asyncio.current_task()}
    [result] = await attached([gone], runtime).batch_execute([ToolCall("gone", {"fails": False})])
    assert result.content == "fine"  # the only place is free again


def test_a_tool_may_call_other_tools_of_its_group():
    class Kitchen:
        executor: AsyncToolExecutor

        @tool
        async def cook(self) -> str:
            [result] = await self.executor.batch_execute([ToolCall("heat")])
            return result.content

        @tool
        def heat(self) -> str:
            return "hot"

    kitchen = Kitchen()
    kitchen.executor = AsyncToolExecutor([kitchen.cook, kitchen.heat])
    [result] = asyncio.run(kitchen.executor.batch_execute([ToolCall("cook")]))
    assert result.content == "hot"
