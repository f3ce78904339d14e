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

from tests.kits.tools import Lookup, ask, call
from TrainingFactory.assembly.tools import mark_cacheable
from TrainingFactory.common.endpoints.openai import ChatEndpoint
from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.cache import cache as cache_module
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.custom_tools import AgentTool, ModelTool, calculator
from TrainingFactory.tools.fingerprint import fingerprint_call
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult


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
        return fingerprint_call(tool, tool.options, arguments)

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

        return mark_cacheable(tool(name="ask")({"3": three, "4": four}[answer]))

    def model(model: str = "m", url: str = "http://h/v1", **options: Any) -> Any:
        return ModelTool("ask", "", url, model, **options)

    def agent(**options: Any) -> Any:
        [made] = AgentTool("ask", "", ChatEndpoint("http://h/v1", "m"), **options).session().tools
        return made

    makers: list[Any] = [
        lambda: function("3"), lambda: function("4"), lambda: as_tool(Bare("C")), lambda: as_tool(Bare("F")),
        lambda: as_tool(Other("C")), model, lambda: model("n"), lambda: model(url="http://h/v2"),
        lambda: model(system_prompt="Be rude."), lambda: model(options={"temperature": 0}), agent,
        lambda: agent(system_prompt="Be rude."), lambda: agent(tools=[calculator]), lambda: agent(max_turns=2),
    ]  # fmt: skip

    def name(made: Any) -> str | None:
        return fingerprint_call(made, made.options, {"prompt": "x"})

    names = [name(mark_cacheable(make())) for make in makers]
    assert None not in names and len(set(names)) == len(names)
    assert [name(mark_cacheable(make())) for make in makers] == names  # the same in the next run


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
        [result] = ask(cache, [lookup], call(), max_output_chars=size)
        assert ("cut" in result.content) == (size == 10)
    assert len(lookup.calls) == 2 and result.cached


async def test_equal_calls_at_the_same_time_run_once(cache: ToolCache):
    lookup, runtime = Lookup(), ToolRuntime(cache=cache)
    executors = [AsyncToolExecutor([lookup]) for _ in range(20)]
    for number, executor in enumerate(executors):
        executor.attach(runtime, str(number))
    batches = await asyncio.gather(*(each.batch_execute([call(q=1)]) for each in executors))
    results = [result for [result] in batches]
    assert len(lookup.calls) == 1 and {result.content for result in results} == {'about {"q": 1}'}
    assert sum(result.cached for result in results) == 19
    assert runtime.snapshot()["tools/lookup/cache_hits"] == 19


async def test_who_is_cancelled_or_fails_takes_nobody_along(cache: ToolCache):
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

    leader = asyncio.create_task(episode())
    followers = [asyncio.create_task(episode()) for _ in range(4)]
    while not started:
        await asyncio.sleep(0)
    followers[0].cancel()
    leader.cancel()
    leader, cancelled, failed, own_failure, fine = await asyncio.gather(
        leader, *followers, return_exceptions=True
    )
    assert isinstance(leader, asyncio.CancelledError) and isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(failed, ToolFailure)  # the one that took over
    assert own_failure.content == "down" and fine.content == "fine"  # and these ran by themselves
    assert len(started) == 4


async def test_after_a_cancelled_caller_the_others_still_run_once(cache: ToolCache):
    lookup = Lookup()
    executors = [AsyncToolExecutor([lookup]) for _ in range(5)]
    for executor in executors:
        executor.attach(ToolRuntime(cache=cache), "")
    leader, *others = (asyncio.create_task(each.batch_execute([call()])) for each in executors)
    while not lookup.calls:
        await asyncio.sleep(0)
    leader.cancel()
    results = [result for [result] in await asyncio.gather(*others)]
    assert [result.cached for result in results] == [False, True, True, True]
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
    assert "damaged" in caplog.text and len(list(tmp_path.glob("tools.sqlite.damaged-*"))) == 1
    assert [asyncio.run(cache.execute_with_cache(call())).cached for _ in range(2)] == [False, True]
    assert len(lookup.calls) == 2 and cache.num_failures == 0
    cache.close()


FULL = ["PRAGMA max_page_count = 1"]
GONE = ["DROP TABLE entries"]
LOCKED = ["PRAGMA busy_timeout = 1"]


@pytest.mark.parametrize("trouble", [FULL, GONE, LOCKED])
def test_a_store_that_fails_in_mid_run_only_costs_its_hits(
    tmp_path: Path, trouble: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cache_module, "STORE_PAUSE_SECONDS", 0.0)
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
    assert cache.num_failures >= 2 and caplog.text.count("tool cache") == 1
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
            assert cache.num_failures == 0, cache.num_failures
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
