"""Rewards and tools in real Ray actors: what they give is what they give here, also when an actor is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.judge import all_scored, finished
from tests.kits.parrot import parrot
from tests.kits.scale import SCALE
from TrainingFactory.assembly.rewards import close_reward, make_reward, open_reward
from TrainingFactory.assembly.tools import make_tools
from TrainingFactory.cluster.ray_session import RaySession
from TrainingFactory.cluster.ray_workers import RayWorker
from TrainingFactory.common.workers import WorkerDied, WorkerError, WorkerTooSlow
from TrainingFactory.config import TrainingConfig
from TrainingFactory.rewards.workers.process import FinishedEpisode
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import ToolCall, ToolResult

pytestmark = [SCALE, pytest.mark.usefixtures("ray_head")]

CODE = '''
import os, time
from TrainingFactory.tools import tool

def answering(settings):
    def answer(message):
        if message == "raise":
            raise KeyError("x")
        if message == "hang":
            time.sleep(600)
        return [settings, message, os.getpid()]
    return answer

def score(trajectory):
    said = trajectory.turns[-1].message.content
    return (said == str(trajectory.task.answer)) + 0.25 * len(said)

def score_or_die(trajectory):
    said = trajectory.turns[-1].message.content
    marker = said.partition(" ")[2]
    if marker and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), 9)
    return len(said)

@tool(concurrency=1)
def alone(log: str) -> int:
    """Note who is at work."""
    with open(log, "a") as file:
        print("in", file=file, flush=True)
        time.sleep(0.05)
        print("out", file=file, flush=True)
    return os.getpid()

@tool
def wrong(how: str) -> str:
    """Go wrong."""
    if how == "leave":
        raise SystemExit(3)
    raise {"value": ValueError, "lost": ConnectionError}[how]("as asked")
'''


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file, found in the folder that the actors are started from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "own_code.py"
    file.write_text(CODE)
    return file


def config(**sections: Any) -> TrainingConfig:
    return TrainingConfig(**{"compute": {"backend": "ray"}} | sections)


def test_a_function_is_asked_as_in_a_process_of_this_machine(code: Path) -> None:
    async def asked() -> None:
        worker = RayWorker("own_code:answering", {"a": 1}, role="test")
        [settings, said, pid] = await worker.ask("hello", 60)
        assert (settings, said) == ({"a": 1}, "hello") and pid != os.getpid() and worker.alive
        with pytest.raises(WorkerError, match=r"^KeyError: 'x'$"):
            await worker.ask("raise", 60)
        assert (await worker.ask("again", 60))[2] == pid
        with pytest.raises(WorkerTooSlow, match=r"did not answer within 0\.2 s"):
            await worker.ask("hang", 0.2)
        other = (await worker.ask("again", 60))[2]
        assert other != pid
        hanging = asyncio.create_task(worker.ask("hang", 60))
        await asyncio.sleep(0.1)
        os.kill(other, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="died"):
            await hanging
        last = (await worker.ask("again", 60))[2]
        await worker.close()
        with pytest.raises(WorkerDied, match="was closed"):
            await worker.ask("again", 60)
        assert await gone(last)
        with pytest.raises(WorkerError, match="has no attribute 'nothing'"):
            await RayWorker("own_code:nothing", {}, role="test").ask("hello", 60)

    asyncio.run(asked())


@pytest.mark.slow  # the next test compares rewards from actors, too
def test_rewards_are_those_of_this_process(code: Path) -> None:
    rows = [finished(text, answer=4) for text in ("4", "five", "", "44")]
    reward = {"type": "function", "options": {"function": "own_code.py:score", "processes": 2}}
    here, there = config(reward=reward, compute={"backend": "local"}), config(reward=reward)
    assert asyncio.run(scores(there, rows)) == asyncio.run(scores(here, rows)) == [1.25, 1.0, 0.0, 0.5]


def test_a_reward_worker_that_is_killed_costs_no_row(code: Path, tmp_path: Path) -> None:
    rows = [finished(text) for text in ("a", f"b {tmp_path / 'killed'}", "c")]
    chosen = {"type": "function", "options": {"function": "own_code.py:score_or_die"}}
    given = config(reward=chosen, optimization={"distributed_reward": True, "reward_workers": 2})
    assert asyncio.run(scores(given, rows)) == [1.0, float(len(f"b {tmp_path / 'killed'}")), 1.0]
    assert (tmp_path / "killed").exists()


async def scores(chosen: TrainingConfig, rows: list[Any]) -> list[float]:
    reward: Any = make_reward(chosen)
    try:
        return [
            each.outcome for each in await asyncio.gather(*(reward(FinishedEpisode(row)) for row in rows))
        ]
    finally:
        await close_reward(reward)


@asynccontextmanager
async def episodes(chosen: TrainingConfig, count: int) -> AsyncIterator[list[AsyncToolExecutor]]:
    """Open the tools of a config for some episodes of one run."""
    tools, runtime = make_tools(chosen), ToolRuntime()
    sources: list[Any] = [tool for tool in tools if hasattr(tool, "open")]
    made = []
    try:
        for source in sources:
            await source.open()
        made += [AsyncToolExecutor(tools) for _ in range(count)]
        for number, each in enumerate(made):
            each.attach(runtime, number)
        yield made
    finally:
        for each in [*made, *sources]:
            await each.close()


async def call(executor: AsyncToolExecutor, name: str, **arguments: Any) -> ToolResult:
    [result] = await executor.batch_execute([ToolCall(name, arguments, "c")])
    return result


CALLS = [
    ("wrong", {"how": "value"}), ("wrong", {"how": "leave"}), ("wrong", {"how": "lost"}), ("wrong", {"how": 3}),
    ("python", {"code": "x = 41"}), ("python", {"code": "x + 1"}), ("python", {"code": "1 / 0"}),
    ("python", {"code": "import os; os._exit(3)"}), ("python", {"code": "x"}),
]  # fmt: skip


def test_remote_tools_answer_as_they_do_here(code: Path) -> None:
    tools = [{"name": "own_code.py", "remote": True}, {"name": "python"}]

    async def told(backend: str) -> list[tuple[str, bool]]:
        async with episodes(config(tools=tools, compute={"backend": backend}), 1) as [episode]:
            results = [await call(episode, name, **arguments) for name, arguments in CALLS]
            return [(result.content, result.ok) for result in results]

    there = asyncio.run(told("ray"))
    assert there == asyncio.run(told("local"))
    assert ("42", True) in there and ("wrong failed: ValueError: as asked", False) in there


def test_limits_hold_over_all_actors_and_an_episode_keeps_to_one(code: Path, tmp_path: Path) -> None:
    given = config(tools=[{"name": "own_code.py:alone", "remote": True}], environment={"num_workers": 2})

    async def played() -> list[list[str]]:
        async with episodes(given, 4) as made:
            calls = [call(each, "alone", log=str(tmp_path / "log")) for each in made * 2]
            found = [result.content for result in await asyncio.gather(*calls)]
            return [found[:4], found[4:]]

    first, second = asyncio.run(played())
    assert first == second and len(set(first)) == 2 and str(os.getpid()) not in first
    assert (tmp_path / "log").read_text().split() == ["in", "out"] * 8


def test_an_executor_that_dies_is_told_to_the_model_and_replaced(code: Path) -> None:
    given = config(tools=[{"name": "own_code.py:alone", "remote": True}, {"name": "python"}])

    async def played() -> list[ToolResult]:
        async with episodes(given, 1) as [episode]:
            await call(episode, "python", code="x = 1")
            pid = int((await call(episode, "alone", log=os.devnull)).content)
            hanging = asyncio.create_task(call(episode, "python", code="import time; time.sleep(9)"))
            await asyncio.sleep(0.3)
            [interpreter] = psutil.Process(pid).children()
            os.kill(pid, signal.SIGKILL)
            found = [await hanging]
            assert await gone(interpreter.pid)
            found += [await call(episode, "python", code=text) for text in ("2 + 2", "3 + 3")]
            last = int(
                (await call(episode, "alone", log=os.devnull)).content
            )  # and nothing about a fresh process
            [interpreter] = psutil.Process(last).children()
        assert await gone(last) and await gone(interpreter.pid)
        return found

    lost, fresh, last = asyncio.run(played())
    assert not lost.ok and lost.error == "unavailable"
    assert lost.content.startswith("python gave no answer") and "died" in lost.content
    assert fresh.ok and fresh.content.startswith("[new process: the previous one died;")
    assert fresh.content.endswith("]\n4") and last.content == "6"


def test_what_cannot_go_there_is_refused(code: Path, tmp_path: Path) -> None:
    servers = tmp_path / "servers.json"
    servers.write_text('{"mcpServers": {"files": {"command": "files"}}}')
    with pytest.raises(ValueError, match=r"tools.0.remote: .*servers.json decides"):
        make_tools(config(tools=[{"name": "files", "config": str(servers), "remote": True}]))

    # It is there when the run starts, and not on the other machine.
    tools = make_tools(config(tools=[{"name": "own_code.py:alone", "remote": True}]))
    code.rename(tmp_path / "elsewhere.py")
    source: Any = tools[0]

    async def open_and_close() -> None:
        try:
            await source.open()
        finally:
            await source.close()

    with pytest.raises(
        ValueError,
        match=r"there is no file own_code.py .*the same path on every machine",
    ):
        asyncio.run(open_and_close())


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "replicas"), [("native", 2), ("vllm", 1)])
def test_a_judge_of_ones_own_on_ray_scores_and_is_made_anew(
    tmp_path: Path, engine: str, replicas: int
) -> None:
    keys = {
        "model": str(parrot(tmp_path, "Score: 7")),
        "engine": engine,
        "replicas": replicas,
        "max_length": 2048,
    }
    given = config(
        reward={"type": "model_judge", "judge": keys}, compute={"backend": "ray", "cpus_per_sampler": 0.5}
    )

    async def judged() -> tuple[list[float], dict[str, Any], list[int]]:
        reward: Any = make_reward(given)
        async with AsyncExitStack() as held:
            await open_reward(reward, held, said.append)
            found = await all_scored(reward, *(finished(str(number)) for number in range(6)))
            status = await RaySession().describe_cluster()
            judges = [each["pid"] for each in status["actors"] if each["what"].startswith("judge ")]
            for pid in judges:
                os.kill(pid, signal.SIGKILL)
            found += await all_scored(reward, finished("again"))
        return [each.outcome for each in found], await RaySession().describe_cluster(), judges

    said: list[str] = []
    outcomes, status, judges = asyncio.run(judged())
    assert outcomes == [0.7] * 7 and len(judges) == replicas
    assert not [each for each in status["actors"] if each["what"].startswith("judge ")]
    assert sum("is ready after" in text and text.startswith("judge ") for text in said) >= replicas + 1


def test_a_judge_that_cannot_be_placed_is_told_at_once() -> None:
    keys = {"model": "builtin:tiny", "replicas": 2, "gpus": 4}
    reward: Any = make_reward(config(reward={"type": "model_judge", "judge": keys}))

    async def opened() -> None:
        async with AsyncExitStack() as held:
            await open_reward(reward, held, lambda _: None)

    with pytest.raises(ValueError, match=r"Cannot place reward.judge.replicas=2: requested .* 8 GPU"):
        asyncio.run(opened())


async def gone(pid: int) -> bool:
    """Tell whether a process ends, sooner or later."""
    for _ in range(300):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        await asyncio.sleep(0.05)
    return False
