"""Environments in other processes: the pool, failures, isolation, recording, and programs in other languages."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kits.rollout import FakeChat
from tests.kits.run import Quiet, small
from TrainingFactory.assembly.environment import as_environment_factory, find_environment
from TrainingFactory.envs.process import process, programs
from TrainingFactory.rollout.scripted import play
from TrainingFactory.tools.recording import EpisodeKey, Recorder, save_specs
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import Message, Task, ToolCall, ToolFailure, Trajectory

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = f"process:{sys.executable} {ROOT / 'tests' / 'kits' / 'foreign_environment.py'}"
TASK = Task("t0", "Do.")
WIN = Message("assistant", "win")
has_landlock = sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 1
needs_landlock = pytest.mark.skipif(not has_landlock, reason="this kernel has no Landlock")


def factory(name: str = PROGRAM, **options: Any) -> Any:
    return as_environment_factory(find_environment(name), options)


async def said(environment: Any, text: str) -> str:
    step = await environment.step(Message("assistant", text))
    return step.replies[0].content


def played(environment: Any, *texts: str, **options: Any) -> Trajectory:
    """Play one episode with these messages, and end the processes."""

    async def main() -> Trajectory:
        script = [Message("assistant", text) for text in texts]
        episode = await play(environment(TASK), FakeChat(), script, **options)
        await environment.pool.close()
        return episode

    return asyncio.run(main())


def test_episodes_share_processes() -> None:
    async def main() -> None:
        made = factory()
        episodes = [made(Task(f"t{number}", "")) for number in range(256)]
        await asyncio.gather(*(episode.reset() for episode in episodes))
        pids = await asyncio.gather(*(said(episode, "pid") for episode in episodes))
        assert {pids.count(pid) for pid in pids} == {32} and len(set(pids)) == 8
        await asyncio.gather(*(episode.close() for episode in episodes))
        assert made.pool.metrics()["environment/processes"] == 8
        await made.pool.close()
        assert not [pid for pid in pids if psutil.pid_exists(int(pid))]

    asyncio.run(main())


def test_an_isolated_episode_has_its_own_process() -> None:
    async def main() -> None:
        made = factory(isolation="episode")
        episodes = [made(TASK) for _ in range(3)]
        await asyncio.gather(*(episode.reset() for episode in episodes))
        pids = [await said(episode, "pid") for episode in episodes]
        assert len(set(pids)) == 3
        await episodes[0].close()
        assert not psutil.pid_exists(int(pids[0])) and psutil.pid_exists(int(pids[1]))
        await made.pool.close()

    asyncio.run(main())


def test_a_killed_process_is_counted_and_replaced() -> None:
    async def main() -> None:
        made = factory()
        episodes = [made(TASK) for _ in range(3)]
        await asyncio.gather(*(episode.reset() for episode in episodes))
        pid = await said(episodes[0], "pid")
        os.kill(int(pid), signal.SIGKILL)
        for episode in episodes:
            with pytest.raises(ToolFailure, match="SIGKILL"):
                await episode.step(WIN)
            await episode.close()
        later = made(TASK)
        await later.reset()
        assert await said(later, "pid") != pid
        metrics = made.pool.metrics()
        assert metrics["environment/crashes"] == 1 and metrics["environment/lost_episodes"] == 3
        await made.pool.close()

    asyncio.run(main())


def test_an_episode_of_a_dead_process_has_no_reward() -> None:
    episode = played(factory(), "die")
    assert (episode.status, episode.reward) == ("tool_failure", None)
    assert episode.error and "SIGKILL" in episode.error and "out of cheese" in episode.error


def test_a_process_that_dies_before_the_first_turn_is_replaced() -> None:
    async def main() -> None:
        made = factory()
        first = made(TASK)
        await first.reset()
        os.kill(int(await said(first, "pid")), signal.SIGKILL)
        second = made(TASK)
        await second.reset()  # may meet the dying process
        assert (await second.step(WIN)).done
        await made.pool.close()

    asyncio.run(main())


def test_a_lost_episode_is_counted_and_its_process_stays() -> None:
    """A `reset` that fails in this way is repeated."""

    async def main() -> None:
        made = factory(args={"lose_first_reset": True})
        episodes = [made(TASK) for _ in range(2)]
        for episode in episodes:
            await episode.reset()
        pid = await said(episodes[0], "pid")
        with pytest.raises(ToolFailure, match="the server is gone"):
            await episodes[0].step(Message("assistant", "lose"))
        assert await said(episodes[1], "pid") == pid and (await episodes[1].step(WIN)).done
        metrics = made.pool.metrics()
        assert metrics["environment/crashes"] == 0 and metrics["environment/lost_episodes"] == 1
        await made.pool.close()

    asyncio.run(main())
    episode = played(factory(), "lose")
    assert (episode.status, episode.reward) == ("tool_failure", None)


def test_rewards_metrics_and_stop_reasons_carry_over() -> None:
    environment = factory(args={"score": {"reward": 0.25, "parts": {"style": 0.5}}})
    episode = played(environment, "earn 0.5", "win")
    assert episode.reward is not None
    assert (episode.reward.outcome, episode.reward.steps) == (1.25, [0.5, 0.0])
    assert episode.reward.parts == {"turns": 2.0, "style": 0.5}
    assert episode.turns[1].signals == {"turns": 2.0, "stop/won": 1.0}
    assert environment.pool.metrics()["environment/stop/won"] == 1


def test_an_environment_without_a_reward_is_not_scored() -> None:
    episode = played(factory(), "pid", max_turns=1)
    assert episode.reward is None and episode.error and "no reward" in episode.error


def test_calls_that_do_not_match_the_schema_stay_here() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tools = [{"name": "move", "description": "Move.", "parameters": schema}]

    async def main() -> None:
        made = factory(args={"describe": {"actions": "tools", "tools": tools}})
        environment = made(TASK)
        await environment.reset()
        assert [tool.spec.name for tool in environment.tools] == ["move"]
        calls = [
            ToolCall("fly", {}, "a"),
            ToolCall("move", {"x": 2}, "b"),
            ToolCall("move", {"x": "left"}, "c"),
        ]
        step = await environment.step(Message("assistant", "", tool_calls=calls))
        assert [reply.tool_call_id for reply in step.replies] == ["a", "b", "c"]
        assert [result.error for result in step.tool_results] == ["unknown", None, "schema"]
        assert step.replies[1].content == '{"x": 2}'
        await made.pool.close()

    asyncio.run(main())


def test_json_actions_are_parsed_and_checked() -> None:
    async def main() -> None:
        made = factory(args={"describe": {"actions": "json", "schema": {"type": "array"}}})
        environment = made(TASK)
        await environment.reset()
        assert await said(environment, "[1, 2]") == "[1, 2]"
        assert "schema" in await said(environment, '{"a": 1}')
        assert "JSON" in await said(environment, "[1,")
        await made.pool.close()

    asyncio.run(main())


def test_an_answer_over_8_mib_ends_its_episode_alone() -> None:
    async def main() -> None:
        made = factory()
        environment, other = made(TASK), made(TASK)
        await asyncio.gather(environment.reset(), other.reset())
        with pytest.raises(RuntimeError, match="more than 8 MiB"):
            await environment.step(Message("assistant", "large"))
        assert (await other.step(WIN)).done
        await made.pool.close()

    asyncio.run(main())


def test_a_request_over_8_mib_is_not_sent() -> None:
    async def main() -> None:
        made = factory()
        environment = made(TASK)
        await environment.reset()
        with pytest.raises(RuntimeError, match="request has"):
            await environment.step(Message("assistant", "x" * 9 * 2**20))
        assert (await environment.step(WIN)).done
        await made.pool.close()

    asyncio.run(main())


def test_an_error_of_the_environment_ends_the_episode() -> None:
    episode = played(factory(), "fail")
    assert episode.status == "error" and episode.error and "the board is full" in episode.error


def test_a_process_that_does_not_answer_gets_no_new_episodes() -> None:
    async def main() -> None:
        made = factory(timeouts={"step": 0.2})
        stuck, other = made(TASK), made(TASK)
        await asyncio.gather(stuck.reset(), other.reset())
        pid = await said(other, "pid")
        with pytest.raises(ToolFailure, match="longer than"):
            await stuck.step(Message("assistant", "sleep 1000"))
        later = made(TASK)
        await later.reset()
        assert await said(later, "pid") != pid
        assert (await other.step(WIN)).done  # its other episodes continue
        await other.close()
        await stuck.close()
        assert not psutil.pid_exists(int(pid))
        await made.pool.close()

    asyncio.run(main())


def test_no_secrets_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_API_KEY", "sesame")
    monkeypatch.setenv("GAME_SPEED", "fast")

    async def main() -> str:
        made = factory(env=["GAME_SPEED"])
        environment = made(TASK)
        await environment.reset()
        variables = await said(environment, "environ")
        if has_landlock:
            assert (await said(environment, f"read /proc/{os.getpid()}/environ")).startswith("denied")
        await made.pool.close()
        return variables

    variables = json.loads(asyncio.run(main()))
    assert variables["GAME_SPEED"] == "fast" and "PROVIDER_API_KEY" not in variables
    assert "sesame" not in str(variables) and variables["HOME"] != os.environ["HOME"]


@needs_landlock
def test_files_of_the_run_are_not_readable(tmp_path: Path) -> None:
    secret = tmp_path / "run.json"
    secret.write_text("sesame")
    shared = tmp_path / "board.txt"
    shared.write_text("a board")

    async def main() -> None:
        made = factory(readable=[str(shared)])
        environment = made(TASK)
        await environment.reset()
        assert (await said(environment, f"read {secret}")).startswith("denied")
        assert await said(environment, f"read {shared}") == "read a board"
        await made.pool.close()

    asyncio.run(main())


def test_missing_confinement_is_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch = tmp_path / "launch.py"  # what launch.py does on a kernel without Landlock
    launch.write_text(
        "import os, sys\n"
        "print('unrestricted: Landlock is missing', file=sys.stderr, flush=True)\n"
        "os.execvp(sys.argv[2], sys.argv[2:])\n"
    )
    monkeypatch.setattr(process, "LAUNCHER_FILE", launch)
    environment = factory(isolation="episode")
    for _ in range(2):
        played(environment, "win")
    assert [record.getMessage() for record in caplog.records].count(
        f"environment {PROGRAM.partition(':')[2]} can read all of your files: Landlock is missing"
    ) == 1


def test_prints_do_not_break_the_pipe() -> None:
    files = [programs.SERVER_FILE, ROOT / "tests" / "kits" / "shouting_adapter.py"]
    environment = factory(f"process:{sys.executable} -I {files[0]} {files[1]}")
    assert [task.id for task in environment.tasks("train", 0, 5)] == ["a"]
    episode = played(environment, "hello")
    assert episode.status == "done" and episode.turns[0].replies[0].content == "HELLO"


def test_tasks_come_from_the_program() -> None:
    tasks = factory().tasks("train", 0, 3)
    assert [(task.id, task.prompt, task.answer) for task in tasks] == [(f"t{i}", "Do.", i) for i in range(3)]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("process:no-such-program --x", {}, "cannot find the program 'no-such-program'"),
        ("process:'", {}, "No closing quotation"),
        ("gymnasium:FrozenLake-v1", {}, "tfactory envs add gymnasium"),
        ("gymnasium:", {}, "gymnasium:NAME"),
        (PROGRAM, {"isolatoin": "episode"}, "isolation"),
        (PROGRAM, {"timeouts": {"steps": 3.0}}, "step"),
        (PROGRAM, {"readable": ["/no/such/folder"]}, "/no/such/folder"),
    ],
)
def test_mistakes_are_named(
    name: str, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(programs.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match=text):
        factory(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        (PROGRAM, {"args": {"protocol": 7}}, "it speaks protocol 7"),
        (f"process:{sys.executable} -c 'import no_such_module'", {}, "No module named"),
        (f"process:{sys.executable} -c 'import time; time.sleep(9)'", {"timeouts": {"start": 0.5}}, "0.5 s"),
    ],
)
def test_programs_that_do_not_start_are_explained(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        factory(name, **options).tasks("train", 0, 1)


def test_no_process_outlives_a_killed_run() -> None:
    code = (
        "import asyncio, sys\n"
        "from tests.envs.test_process import TASK, factory, said\n"
        "async def main():\n"
        "    environment = factory(args={'stubborn': True})(TASK)\n"
        "    await environment.reset()\n"
        "    print(await said(environment, 'pid'), flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    run.kill()
    run.communicate()
    if sys.platform == "linux":
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)  # the suite's time limit ends a failure


@pytest.mark.training
def test_a_run_continues_when_processes_are_killed(tmp_path: Path) -> None:
    args = {"score": {"reward": 0.5}, "die_at_reset": 4}
    environment = {
        "environment_id": PROGRAM,
        "options": {"args": args, "episodes_per_process": 4},
        "max_turns": 2,
    }
    training = {"max_steps": 2, "batch_size": 2, "group_size": 4}
    config = small(tmp_path, environment=environment, training=training, reward={"max_unscored": 1.0})
    rows = Training(config, name="run", watcher=Quiet()).train().rows
    assert [row["episodes"] for row in rows] == [8, 8]
    assert all(row["environment/crashes"] >= 1 for row in rows)
    assert all(
        row["episodes/unscored"] > 0 and row["reward"] == 0.5 for row in rows
    )  # lost episodes are not zeros


def test_a_replay_starts_no_process(tmp_path: Path) -> None:
    key = EpisodeKey(0, "t0", 0)
    recorder = Recorder()
    recorder.record_to(tmp_path)
    save_specs(tmp_path, [])
    texts = ("pid", "win")
    recorded = played(factory(), *texts, runtime=ToolRuntime(recorder=recorder), key=key)
    recorder.commit()
    environment = factory()
    replaying = ToolRuntime(recorder=Recorder(tmp_path))
    environment.pool.open_episode = lambda: pytest.fail("a process was started")
    replayed = played(environment, *texts, runtime=replaying, key=key)
    assert (replayed.turns, replayed.reward) == (recorded.turns, recorded.reward)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_example_in_node() -> None:
    source = ROOT / "examples" / "guess" / "guess.mjs"
    assert len(source.read_text().splitlines()) <= 60
    environment = factory(f"process:node {source}")
    task = next(iter(environment.tasks("train", 0, 1)))
    number = task.metadata["number"]

    async def main() -> Trajectory:
        texts = [str(number + 1), "what?", str(number - 1), str(number)]
        episode = await play(environment(task), FakeChat(), [Message("assistant", text) for text in texts])
        await environment.pool.close()
        return episode

    episode = asyncio.run(main())
    replies = [turn.replies[0].content for turn in episode.turns[:-1]]
    assert replies == ["Lower.", "Answer with a number.", "Higher."]
    assert episode.reward is not None and episode.reward.outcome == 1 and episode.reward.parts["guesses"] == 4
