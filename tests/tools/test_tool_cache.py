from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kits.rollout import FakeChat
from TrainingFactory.endpoint import Endpoint
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.rollout.scripted import play
from TrainingFactory.services.build.tools import cacheable
from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.cache import cache as cache_module
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.custom_tools import AgentTool, ModelTool, calculator
from TrainingFactory.tools.fingerprint import call_name
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Message, Task, ToolCall, ToolFailure, ToolResult, ToolSpec


class Lookup:
    """Counts how often it is really called."""

    def __init__(
        self, name: str = "lookup", parameters: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.spec = ToolSpec(name, "", parameters or {"type": "object", "properties": {}})
        self.options = ToolOptions(**({"pure": True, "retries": 0} | options))
        self.calls: list[dict[str, Any]] = []
        self.answer: Any = None

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        self.calls.append(arguments)
        await asyncio.sleep(0)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer or ToolResult(f"about {json.dumps(arguments)}")


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


def call(name: str = "lookup", **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def ask(cache: ToolCache, tools: list[Any], *calls: ToolCall, key: str = "0/a/0") -> list[ToolResult]:
    """One episode with these calls, one after another."""
    executor = AsyncToolExecutor(tools)
    executor.attach(ToolRuntime(cache=cache), key)

    async def main() -> list[ToolResult]:
        return [(await executor.batch_execute([each]))[0] for each in calls]

    return asyncio.run(main())


@pytest.fixture
def cache(tmp_path: Path) -> Any:
    made = ToolCache(tmp_path / "cache" / "tools.sqlite")
    yield made
    made.close()


def test_a_cache_over_some_tools(tmp_path: Path):
    lookup = Lookup()
    cache = ToolCache(tmp_path / "tools.sqlite", [lookup])

    async def main() -> None:
        first = await cache.execute_with_cache(ToolCall("lookup", {"city": "Oslo"}, id="1"))
        again = await cache.execute_with_cache(ToolCall("lookup", {"city": "Oslo"}, id="2"))
        assert first.content == again.content == 'about {"city": "Oslo"}'
        assert (first.cached, first.id) == (False, "1") and (again.cached, again.id) == (True, "2")
        assert (await cache.execute_with_cache(ToolCall("nothing"))).error == "unknown"

    asyncio.run(main())
    assert len(lookup.calls) == 1
    cache.close()
    later = ToolCache(tmp_path / "tools.sqlite", [lookup])
    assert asyncio.run(later.execute_with_cache(call(city="Oslo"))).cached
    later.close()
    [row] = sqlite3.connect(tmp_path / "tools.sqlite").execute("SELECT value FROM entries").fetchall()
    assert json.loads(row[0]) == {"content": 'about {"city": "Oslo"}', "attachments": []}


def test_what_makes_two_calls_the_same():
    lookup = Lookup()

    def name(arguments: dict[str, Any], tool: Any = lookup) -> str | None:
        return call_name(tool, tool.options, arguments)

    same = name({"a": 1, "b": {"c": [1, 2], "d": "é"}})
    assert same is not None and same == name({"b": {"d": "é", "c": [1, 2]}, "a": 1})
    values: list[Any] = [1, 1.0, True, "1", None, [1], 2, "é", "e\u0301", -0.0, 0.0, {}, []]
    others = [{}, *({"a": value} for value in values), {"b": 1}]
    assert len({name(arguments) for arguments in others}) == len(others)
    tools = [
        lookup,
        Lookup("other"),
        Lookup(server="x"),
        Lookup(version="2"),
        Lookup(parameters={"type": "object"}),
    ]
    assert len({name({}, tool) for tool in tools}) == len(tools)
    assert name({"a": object()}) is None


def test_a_function_that_is_changed_is_another_function(tmp_path: Path):
    program = """
        import asyncio, sys
        from TrainingFactory.tools import tool
        from TrainingFactory.tools.cache.cache import ToolCache
        from TrainingFactory.types import ToolCall

        @tool(pure=True)
        async def price(of: str) -> str:
            return "PRICE"

        cache = ToolCache(sys.argv[1], [price])
        print(asyncio.run(cache.execute_with_cache(ToolCall("price", {"of": "tea"}))).content)
        cache.close()
    """

    def run(price: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(program).replace("PRICE", price))
        command = [sys.executable, str(script), str(tmp_path / "tools.sqlite")]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout.strip()

    assert run("3 euros") == "3 euros" and run("4 euros") == "4 euros"


def test_a_tool_that_is_no_function_is_known_by_its_definition():
    class Bare:
        name, description = "ask", "As in qwen_agent."

        def __init__(self, unit: str) -> None:
            self.unit, self.session = unit, object()

        def call(self, params: str, **kwargs: Any) -> str:
            return params

    class Other(Bare):
        def call(self, params: str, **kwargs: Any) -> str:
            return params[::-1]

    def function(answer: str) -> Any:
        def three() -> str:
            return "3"

        def four() -> str:
            return "4"

        return cacheable(tool(name="ask")({"3": three, "4": four}[answer]))

    def model(model: str = "m", url: str = "http://h/v1", **options: Any) -> Any:
        return ModelTool("ask", "", url, model, **options)

    def agent(**options: Any) -> Any:
        [made] = AgentTool("ask", "", Endpoint("http://h/v1", "m"), **options).session().tools
        return made

    makers: list[Any] = [
        lambda: function("3"), lambda: function("4"), lambda: as_tool(Bare("C")), lambda: as_tool(Bare("F")),
        lambda: as_tool(Other("C")), model, lambda: model("n"), lambda: model(url="http://h/v2"),
        lambda: model(system_prompt="Be rude."), lambda: model(options={"temperature": 0}), agent,
        lambda: agent(system_prompt="Be rude."), lambda: agent(tools=[calculator]), lambda: agent(max_turns=2),
    ]  # fmt: skip

    def name(made: Any) -> str | None:
        return call_name(made, made.options, {"prompt": "x"})

    names = [name(cacheable(make())) for make in makers]
    assert None not in names and len(set(names)) == len(names)
    assert [name(cacheable(make())) for make in makers] == names  # the same in the next run


def test_only_good_results_of_tools_that_say_so(cache: ToolCache):
    plain, failing, raising = Lookup("plain", pure=False), Lookup("failing"), Lookup("raising")
    failing.answer = ToolResult("no such city", ok=False, error="failed")
    raising.answer = ValueError("no")
    for each in (plain, failing, raising):
        results = ask(cache, [each], call(each.spec.name), call(each.spec.name))
        assert len(each.calls) == 2 and not any(result.cached for result in results)


def test_attachments_are_kept_and_nobody_can_change_them(cache: ToolCache):
    lookup = Lookup()
    lookup.answer = ToolResult("a picture", attachments=[{"type": "image", "data": "aGk="}])
    ask(cache, [lookup], call())[0].attachments[0]["data"] = "changed"
    ask(cache, [lookup], call())[0].attachments[0]["data"] = "changed"
    [result] = ask(cache, [lookup], call())
    assert result.cached and result.attachments == [{"type": "image", "data": "aGk="}]
    odd = Lookup("odd")
    odd.answer = ToolResult("x", attachments=[{"data": object()}])
    assert not ask(cache, [odd], call("odd"), call("odd"))[1].cached


def test_one_size_is_not_served_for_another(cache: ToolCache):
    lookup = Lookup()
    lookup.answer = ToolResult("x" * 1000)
    for size in (10, 2000, 10, 2000):
        executor = AsyncToolExecutor([lookup], max_output_chars=size)
        executor.attach(ToolRuntime(cache=cache), "0/a/0")
        [result] = asyncio.run(executor.batch_execute([call()]))
        assert ("cut" in result.content) == (size == 10)
    assert len(lookup.calls) == 2 and result.cached


def test_equal_calls_at_the_same_time_run_once(cache: ToolCache):
    lookup, runtime = Lookup(), ToolRuntime(cache=cache)

    async def main() -> list[ToolResult]:
        executors = [AsyncToolExecutor([lookup]) for _ in range(20)]
        for number, executor in enumerate(executors):
            executor.attach(runtime, str(number))
        batches = await asyncio.gather(*(each.batch_execute([call(q=1)]) for each in executors))
        return [result for [result] in batches]

    results = asyncio.run(main())
    assert len(lookup.calls) == 1 and {result.content for result in results} == {'about {"q": 1}'}
    assert sum(result.cached for result in results) == 19
    assert runtime.snapshot()["tools/lookup/cache_hits"] == 19


def test_who_is_cancelled_or_fails_takes_nobody_along(cache: ToolCache):
    started, answers = [], iter([None, ToolFailure("gone"), ToolResult("down", ok=False, error="failed")])

    class Slow(Lookup):
        async def run(self, arguments: dict[str, Any]) -> ToolResult:
            started.append(arguments)
            answer = next(answers, ToolResult("fine"))
            await asyncio.sleep(30 if answer is None else 0.01)
            if isinstance(answer, BaseException):
                raise answer
            assert answer is not None
            return answer

    slow = Slow()

    async def episode() -> ToolResult:
        executor = AsyncToolExecutor([slow])
        executor.attach(ToolRuntime(cache=cache), "")
        return (await executor.batch_execute([call()]))[0]

    async def main() -> list[Any]:
        leader = asyncio.create_task(episode())
        followers = [asyncio.create_task(episode()) for _ in range(4)]
        while not started:
            await asyncio.sleep(0)
        followers[0].cancel()
        leader.cancel()
        return await asyncio.gather(leader, *followers, return_exceptions=True)

    leader, cancelled, failed, own_failure, fine = asyncio.run(main())
    assert isinstance(leader, asyncio.CancelledError) and isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(failed, ToolFailure)  # the one that took over
    assert own_failure.content == "down" and fine.content == "fine"  # and these ran by themselves
    assert len(started) == 4


def test_after_a_cancelled_caller_the_others_still_run_once(cache: ToolCache):
    lookup = Lookup()

    async def main() -> list[ToolResult]:
        executors = [AsyncToolExecutor([lookup]) for _ in range(5)]
        for executor in executors:
            executor.attach(ToolRuntime(cache=cache), "")
        leader, *others = (asyncio.create_task(each.batch_execute([call()])) for each in executors)
        while not lookup.calls:
            await asyncio.sleep(0)
        leader.cancel()
        return [result for [result] in await asyncio.gather(*others)]

    assert [result.cached for result in asyncio.run(main())] == [False, True, True, True]
    assert len(lookup.calls) == 2


def test_results_grow_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lookup, now = Lookup(), time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    cache = ToolCache(tmp_path / "tools.sqlite", [lookup], ttl=60)

    def cached() -> bool:
        return asyncio.run(cache.execute_with_cache(call())).cached

    assert not cached() and cached()
    now += 59
    assert cached()
    now += 2
    assert not cached() and cached()
    cache.close()
    now += 61
    cache = ToolCache(tmp_path / "tools.sqlite", [lookup], ttl=60)
    assert not cached()
    cache.close()


def test_the_least_recently_used_go_first(tmp_path: Path):
    lookup = Lookup()
    lookup.answer = ToolResult("x" * 1000)
    path = tmp_path / "tools.sqlite"

    def ask_for(*numbers: int) -> list[bool]:
        cache = ToolCache(path, [lookup], max_bytes=10_500, memory_bytes=0)
        found = []
        for number in numbers:
            found.append(asyncio.run(cache.execute_with_cache(call(number=number))).cached)
            cache.flush()
        cache.close()
        return found

    assert not any(ask_for(*range(9)))
    assert ask_for(0) == [True]  # used again
    assert not any(ask_for(9, 10))
    rows = sqlite3.connect(path)
    [(size, listed)] = rows.execute("SELECT SUM(size), (SELECT bytes FROM total) FROM entries").fetchall()
    assert size == listed <= 10_500
    assert ask_for(0, 10, 9) == [True, True, True]
    assert ask_for(1) == [False]
    assert not ask_for(1_000)[0]


def test_memory_is_bounded(tmp_path: Path):
    """Once the file is empty, only what is still in memory is a hit."""
    lookup = Lookup()
    lookup.answer = ToolResult("x" * 1000)
    cache = ToolCache(tmp_path / "tools.sqlite", [lookup], memory_bytes=5000)

    def ask_for(*numbers: int) -> list[bool]:
        return [asyncio.run(cache.execute_with_cache(call(number=number))).cached for number in numbers]

    ask_for(*range(20))
    cache.flush()
    assert ask_for(0) == [True]  # from the file
    with sqlite3.connect(tmp_path / "tools.sqlite") as rows:
        rows.execute("DELETE FROM entries")
    rows.close()
    assert ask_for(19, 18, 17, 0, 16, 1) == [True, True, True, True, False, False]
    cache.close()


def test_stateful_tools_share_after_equal_calls_only(cache: ToolCache):
    first, second, third = Counter(), Counter(), Counter()
    adds = [call("add", by=1), call("add", by=2), call("add", by=1)]
    assert [r.content for r in ask(cache, first.tools(), *adds)] == ["1", "3", "4"]
    again = ask(cache, second.tools(), *adds, key="0/b/0")
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
        executor = AsyncToolExecutor([Door(code).knock])
        executor.attach(ToolRuntime(cache=cache), f"0/{task}/{code}", task)
        [result] = asyncio.run(executor.batch_execute([call("knock")]))
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

    for _ in range(2):
        flaky = Flaky(pure=False, stateful=True, server="shop")
        results = ask(cache, [flaky], call(q=1), call(lost=True), call(q=2))
        assert results[1].error == "exception" and not results[2].cached
    assert results[0].cached and flaky.calls == [{"q": 1}, {"q": 2}]


def test_a_state_that_cannot_be_restored_ends_the_episode(cache: ToolCache):
    ask(cache, [Lookup(pure=False, stateful=True, server="shop")], call(q=1))
    dead = Lookup(pure=False, stateful=True, server="shop")
    dead.answer = ConnectionError("refused")
    with pytest.raises(
        ToolFailure, match="answered from the cache, and shop cannot be brought to that state"
    ):
        ask(cache, [dead], call(q=1), call(q=2))


def test_a_tool_that_is_not_what_it_says_is_told(cache: ToolCache, caplog: pytest.LogCaptureFixture):
    ask(cache, [Lookup(pure=False, stateful=True)], call(q=1))
    other = Lookup(pure=False, stateful=True)
    other.answer = ToolResult("something else")
    ask(cache, [other], call(q=1), call(q=2))
    assert "after equal calls it answered differently" in caplog.text


def test_files_that_are_not_ours_are_refused(tmp_path: Path):
    text, database = tmp_path / "notes.txt", tmp_path / "shop.db"
    text.write_text("my notes")
    with sqlite3.connect(database) as rows:
        rows.execute("CREATE TABLE prices (tea REAL)")
    rows.close()
    for path in (text, database, tmp_path):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises(ValueError, match=f"cannot use {path}: .*another path"):
            ToolCache(path)
        assert path.is_dir() or path.read_bytes() == before


def test_a_damaged_file_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lookup, path = Lookup(), tmp_path / "tools.sqlite"
    cache = ToolCache(path, [lookup])
    asyncio.run(cache.execute_with_cache(call()))
    cache.close()
    path.write_bytes(path.read_bytes()[:100] + b"\xff" * 5000)
    cache = ToolCache(path, [lookup])
    assert "was damaged" in caplog.text and len(list(tmp_path.glob("tools.sqlite.damaged-*"))) == 1
    for _ in range(2):
        result = asyncio.run(cache.execute_with_cache(call()))
    assert result.cached and len(lookup.calls) == 2 and cache.failures == 0
    cache.close()


FULL = ["PRAGMA max_page_count = 1"]
GONE = ["DROP TABLE entries"]
LOCKED = ["PRAGMA busy_timeout = 1"]


@pytest.mark.parametrize("trouble", [FULL, GONE, LOCKED])
def test_a_store_that_fails_in_mid_run_only_costs_its_hits(
    tmp_path: Path, trouble: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cache_module, "REST_SECONDS", 0.0)
    lookup, path = Lookup(), tmp_path / "tools.sqlite"
    lookup.answer = ToolResult("x" * 100_000)
    cache = ToolCache(path, [lookup], memory_bytes=0)
    for statement in trouble:
        cache._store._writer.execute(statement)  # type: ignore[attr-defined]
    other = sqlite3.connect(path, isolation_level=None)
    if trouble is LOCKED:
        other.execute("BEGIN IMMEDIATE")
    for _ in range(2):
        result = asyncio.run(cache.execute_with_cache(call()))
        assert result.ok and not result.cached
        cache.flush()
    other.close()
    assert cache.failures >= 2 and caplog.text.count("the tool cache fails") == 1
    cache.close()


def test_several_processes_share_a_file(tmp_path: Path):
    program = """
        import asyncio, sys
        from TrainingFactory.tools import AsyncToolExecutor, tool
        from TrainingFactory.tools.cache import stores as cache_stores
        from TrainingFactory.tools.cache.cache import ToolCache
        from TrainingFactory.types import ToolCall

        cache_stores.BUSY_SECONDS = 100.0
        made = 0

        @tool(pure=True)
        async def square(of: int) -> str:
            global made
            made += 1
            return f"{of * of} " + "x" * 2000

        async def main():
            cache = ToolCache(sys.argv[1], [square], memory_bytes=0, max_bytes=600_000)
            for round in range(3):
                for number in range(200):
                    result = await cache.execute_with_cache(ToolCall("square", {"of": number}))
                    assert result.content.split()[0] == str(number * number), result
                cache.flush()
            assert cache.failures == 0, cache.failures
            cache.close()

        asyncio.run(main())
        print(made)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "tools.sqlite")]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    with sqlite3.connect(tmp_path / "tools.sqlite") as rows:
        assert rows.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert rows.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert rows.execute(
            "SELECT COUNT(*), SUM(size) - (SELECT bytes FROM total) FROM entries"
        ).fetchone() == (200, 0)
