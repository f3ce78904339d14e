"""The cache of tools with a state: equal calls before, equal answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kits.rollout import FakeChat
from tests.kits.tools import Lookup, ask, call
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.rollout.scripted import play
from TrainingFactory.tools import AsyncToolExecutor, ToolCache, tool
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Message, Task, ToolCall, ToolFailure, ToolResult, ToolSpec


class Counter:
    """A server with state: what it answers depends on what was added before."""

    def __init__(self) -> None:
        self.total = 0
        self.seen: list[int] = []

    def tools(self, **options: Any) -> list[Any]:
        counter = self

        class Add:
            spec = ToolSpec("add")

            def __init__(self) -> None:
                self.options = ToolOptions(**({"stateful": True, "server": "counter"} | options))

            async def run(self, arguments: dict[str, Any]) -> ToolResult:
                await asyncio.sleep(0.001 * (3 - arguments["by"]) if arguments["by"] < 3 else 0)
                counter.seen.append(arguments["by"])
                counter.total += arguments["by"]
                return ToolResult(str(counter.total))

        return [Add()]


def test_stateful_tools_share_after_equal_calls_only(cache: ToolCache):
    first, second, third = Counter(), Counter(), Counter()
    adds = [call("add", by=1), call("add", by=2), call("add", by=1)]
    assert [r.content for r in ask(cache, first.tools(), *adds)] == ["1", "3", "4"]
    again = ask(cache, second.tools(), *adds)
    assert [r.content for r in again] == ["1", "3", "4"] and all(r.cached for r in again)
    assert second.seen == []  # nothing was really called
    other = ask(cache, third.tools(), call("add", by=2), call("add", by=1), call("add", by=1))
    assert [r.content for r in other] == ["2", "3", "4"] and not any(r.cached for r in other)


def test_a_miss_after_hits_first_makes_the_calls_that_were_skipped(cache: ToolCache):
    ask(cache, Counter().tools(), call("add", by=1), call("add", by=2))
    counter = Counter()
    calls = [call("add", by=1), call("add", by=2), call("add", by=10), call("add", by=1)]
    results = ask(cache, counter.tools(), *calls)
    assert [r.content for r in results] == ["1", "3", "13", "14"]
    assert [r.cached for r in results] == [True, True, False, False]
    assert counter.seen == [1, 2, 10, 1]


def test_stateful_calls_of_one_turn_run_in_order_and_share(cache: ToolCache):
    calls = [call("add", by=by) for by in (1, 2, 3)]  # the later, the quicker
    for counter, cached in ((Counter(), False), (Counter(), True)):
        executor = AsyncToolExecutor(counter.tools())
        executor.attach(ToolRuntime(cache=cache), "0/a/0")
        results = asyncio.run(executor.batch_execute(calls))
        assert [r.content for r in results] == ["1", "3", "6"] and [r.cached for r in results] == [cached] * 3


def test_other_tools_of_the_server_count_as_history(cache: ToolCache):
    """One that is not marked may change the state: it is never cached, and the skipped calls come before it."""

    def episode(counter: Counter, factor: int) -> list[ToolResult]:
        class Multiply:
            spec = ToolSpec("multiply")
            options = ToolOptions(server="counter")

            async def run(self, arguments: dict[str, Any]) -> ToolResult:
                counter.total *= arguments["by"]
                return ToolResult(str(counter.total))

        calls = [call("add", by=2), call("multiply", by=factor), call("add", by=1)]
        return ask(cache, [*counter.tools(), Multiply()], *calls)

    for factor, contents, cached in [
        (5, ["2", "10", "11"], [False, False, False]),
        (5, ["2", "10", "11"], [True, False, True]),
        (7, ["2", "14", "15"], [True, False, False]),
    ]:
        results = episode(Counter(), factor)
        assert [r.content for r in results] == contents and [r.cached for r in results] == cached


def test_objects_of_this_process_share_within_a_task(cache: ToolCache):
    class Door:
        def __init__(self, code: str) -> None:
            self.code = code

        @tool(stateful=True)
        def knock(self) -> str:
            return self.code

    def knock(code: str, task: str | None) -> tuple[str, bool]:
        [result] = ask(cache, [Door(code).knock], call("knock"), key=code, task=task)
        return result.content, result.cached

    assert knock("a", "first") == ("a", False) and knock("a", "first") == ("a", True)
    assert knock("b", "second") == ("b", False)
    assert knock("c", None) == ("c", False) and knock("d", None) == ("d", False)


def test_a_task_is_all_of_it(cache: ToolCache):
    """Ids repeat in other data, and the state of an environment may come from anything in its task."""

    class Door(ToolEnvironment):
        @tool(stateful=True)
        def knock(self) -> str:
            return f"{self.task.prompt} {self.task.answer} {self.task.metadata}"

    class Gate(Door): ...

    knocks = [Message("assistant", tool_calls=[ToolCall("knock")]), Message("assistant", "ok")]

    def knock(task: Task, environment: type[Door] = Door) -> tuple[str, bool]:
        played = asyncio.run(play(environment(task), FakeChat(), knocks, runtime=ToolRuntime(cache=cache)))
        [result] = played.turns[0].tool_results
        return result.content, result.cached

    tasks = [
        Task("train-0", "a", "1"), Task("train-0", "b", "1"), Task("train-0", "a", "2"),
        Task("train-0", "a", "1", {"seed": 2}), Task("train-0", [Message("user", "a")], "1"),
    ]  # fmt: skip
    for task in tasks:
        said = f"{task.prompt} {task.answer} {task.metadata}"
        assert knock(task) == (said, False) and knock(task) == (said, True)
    assert not knock(tasks[0], Gate)[1]


def test_after_a_lost_call_nothing_is_shared(cache: ToolCache):
    """Nobody knows whether a call that timed out was done."""

    class Flaky(Lookup):
        async def run(self, arguments: dict[str, Any]) -> ToolResult:
            if arguments.get("lost"):
                raise ConnectionError("reset")
            return await super().run(arguments)

    for cached in (False, True):
        flaky = Flaky(pure=False, stateful=True, server="shop")
        results = ask(cache, [flaky], call(q=1), call(lost=True), call(q=2))
        assert results[1].error == "exception" and not results[2].cached
        assert results[0].cached == cached and flaky.calls == [{"q": 1}, {"q": 2}]


def test_a_call_that_failed_is_not_the_same_history_as_one_that_did_not(cache: ToolCache):
    """Code may be stopped by its time limit in one episode and not in another."""
    stopped, fine = ToolResult("stopped", ok=False, error="exception"), ToolResult("fine")
    for first, cached in ((stopped, False), (fine, False), (fine, True), (stopped, True)):
        changing = Lookup(pure=False, stateful=True, server="shop")
        changing.answer = first

        async def after(arguments: dict[str, Any], tool: Lookup = changing) -> ToolResult:
            result = await Lookup.run(tool, arguments)
            tool.answer = fine
            return result

        changing.run = after  # type: ignore[method-assign]
        results = ask(cache, [changing], call(q=1), call(q=2))
        assert results[1].cached == cached


def test_a_state_that_cannot_be_restored_ends_the_episode(cache: ToolCache):
    ask(cache, [Lookup(pure=False, stateful=True, server="shop")], call(q=1))
    dead = Lookup(pure=False, stateful=True, server="shop")
    dead.answer = ConnectionError("refused")
    with pytest.raises(ToolFailure, match=r"answered from the cache, .* on shop"):
        ask(cache, [dead], call(q=1), call(q=2))


def test_a_tool_that_is_not_what_it_says_is_told(cache: ToolCache, caplog: pytest.LogCaptureFixture):
    ask(cache, [Lookup(pure=False, stateful=True)], call(q=1))
    other = Lookup(pure=False, stateful=True)
    other.answer = ToolResult("something else")
    ask(cache, [other], call(q=1), call(q=2))
    assert "marked stateful, but" in caplog.text
