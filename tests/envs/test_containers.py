"""Task folders in containers. Quick tests use a fake runtime, which records its calls; slow ones a real podman."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.containers import (
    FakeRuntime,
    options,
    podman,
    write_harbor_task,
    write_terminal_bench_task,
)
from tests.kits.rollout import FakeChat
from tests.kits.run import Quiet
from TrainingFactory.assembly.environment import make_environment
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs.containers.environment import ContainerAdapter, read_reward
from TrainingFactory.envs.containers.runtime import OWNER_LABEL, ContainerRuntime, find_runtime, make_owner_id
from TrainingFactory.envs.containers.tasks import read_task, read_task_folders
from TrainingFactory.rollout.scripted import play
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Message, Reward, Task, ToolCall, Trajectory


def messages(*commands: str) -> Iterator[Message]:
    for command in commands:
        yield Message("assistant", tool_calls=[ToolCall("bash", {"command": command})])
    yield Message("assistant", "Done.")


def episode(environment: Any, name: str, *commands: str, expert: bool = False) -> Trajectory:
    made = environment(Task(name, "?"))
    return asyncio.run(play(made, FakeChat(), made.expert() if expert else messages(*commands)))


def outputs(trajectory: Trajectory) -> list[str]:
    return [result.content for turn in trajectory.turns for result in turn.tool_results]


# -- task folders


def test_harbor_folders_are_read(tmp_path: Path) -> None:
    toml = """
        schema_version = "1.4"
        artifacts = []
        [metadata]
        difficulty = "easy"
        [agent]
        timeout_sec = 900.0
        user = "worker"
        [verifier]
        timeout_sec = 45.5
        env = { LEVEL = "3" }
        [environment]
        build_timeout_sec = 60.0
        cpus = 2
        memory_mb = 512
        workdir = "/work"
        env = { LANG = "C" }
    """
    task = read_task(write_harbor_task(tmp_path / "add", toml))
    assert (task.id, task.task_format, task.instruction) == (
        "add",
        "harbor",
        "Add one to the number in the file number.",
    )
    assert (task.test_seconds, task.build_seconds, task.cpus, task.memory_mb) == (45.5, 60.0, 2, 512)
    assert (task.workdir, task.user, task.env, task.test_env) == (
        "/work",
        "worker",
        {"LANG": "C"},
        {"LEVEL": "3"},
    )
    assert task.context_folder == tmp_path / "add" / "environment" and task.image_name is None
    assert task.test_paths == (tmp_path / "add" / "tests",) and task.test_script == "/tests/test.sh"
    older = write_harbor_task(tmp_path / "old", '[environment]\nmemory = "2G"\ndocker_image = "alpine:3"\n')
    assert (read_task(older).memory_mb, read_task(older).image_name, read_task(older).test_seconds) == (
        2048,
        "alpine:3",
        600.0,
    )


def test_terminal_bench_folders_are_read(tmp_path: Path) -> None:
    folder = write_terminal_bench_task(tmp_path / "add")
    task = read_task(folder)
    assert (task.task_format, task.instruction, task.test_seconds) == (
        "terminal-bench",
        "Add one to the number in the file number.",
        30.0,
    )
    assert task.test_paths == (folder / "run-tests.sh", folder / "tests") and not task.writes_reward
    assert task.test_env == {"TEST_DIR": "/tests"} and task.solution_file == folder / "solution.sh"


def test_a_folder_of_folders_is_a_dataset(tmp_path: Path) -> None:
    write_harbor_task(tmp_path / "b")
    write_terminal_bench_task(tmp_path / "a")
    (tmp_path / "notes").mkdir()
    assert [task.id for task in read_task_folders(tmp_path)] == ["a", "b"]
    assert [task.id for task in read_task_folders(tmp_path / "b")] == ["b"]


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ('[environment]\nos = "windows"', "environment.os is windows"),
        ("[environment]\ngpus = 1", "environment.gpus: the task needs a GPU"),
        ('[[steps]]\nname = "one"', "steps: the task needs several steps"),
        ("[verifier]\ntimeout_sec = -1", "timeout_sec must be a number above 0, not -1"),
        ('[environment]\nmemory = "lots"', "such as \"2G\", not 'lots'"),
        ('[verifier]\nenv = { KEY = "${API_KEY}" }', "verifier.env.KEY takes its value from this machine"),
        ("[environment", "cannot read"),
    ],
)
def test_unplayable_tasks_are_rejected_with_their_file(tmp_path: Path, toml: str, problem: str) -> None:
    folder = write_harbor_task(tmp_path / "task", toml)
    with pytest.raises(ValueError) as caught:
        read_task(folder)
    assert problem in str(caught.value) and str(folder / "task.toml") in str(caught.value)
    assert "\n" not in str(caught.value).strip() or "cannot read" in problem


def test_several_services_and_links_out_of_a_folder_are_rejected(tmp_path: Path) -> None:
    two = "services:\n  client: {}\n  database: {}\n"
    with pytest.raises(ValueError, match=r"several services \(client, database\)"):
        read_task(write_terminal_bench_task(tmp_path / "two", compose=two))
    folder = write_harbor_task(tmp_path / "linked")
    (folder / "tests" / "hosts").symlink_to("/etc/hosts")
    with pytest.raises(ValueError, match="links to a file outside"):
        read_task(folder)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("1", Reward(1.0, parts={})),
        ("0.5\n", Reward(0.5, parts={})),
        ('{"reward": 0.25, "speed": 2}', Reward(0.25, parts={"speed": 2.0})),
        ('{"score": 3}', Reward(3.0, parts={"score": 3.0})),
    ],
)
def test_reward_files(text: str, reward: Reward) -> None:
    assert read_reward(text, "") == reward


@pytest.mark.parametrize(
    "text", [None, " ", "good", "NaN", '{"a": 1, "b": 2}', "true", '{"reward": "1"}', "[1]"]
)
def test_a_broken_reward_file_is_an_error_and_no_zero(text: str | None) -> None:
    with pytest.raises(ValueError, match="the tests wrote"):
        read_reward(text, "output of the tests")


# -- the runtime, a fake


def test_without_a_runtime_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_harbor_task(tmp_path / "task")
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = {"environment_id": "containers", "options": {"tasks": str(tmp_path)}}
    with pytest.raises(ValueError) as caught:
        make_environment(TrainingConfig(environment=environment))
    assert str(caught.value).count("\n") == 0
    assert "neither podman nor docker is installed: install podman" in str(caught.value)
    broken = FakeRuntime(tmp_path / "fake")
    broken.answer("info", "cannot connect to the daemon", 1)
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(ValueError, match=r"no container runtime works here .*cannot connect to the daemon"):
        find_runtime(broken.command)


def test_containers_start_with_limits_and_are_removed(tmp_path: Path) -> None:
    fake = FakeRuntime(tmp_path / "fake")
    write_harbor_task(tmp_path / "tasks" / "add", "[environment]\ncpus = 2\nmemory_mb = 512\n")
    fake.answer("exec", "1")
    environment = ContainerAdapter.from_options(
        options(tmp_path / "tasks", fake.command, pids=99)
    ).as_environment()
    trajectory = episode(environment, "add", "ls; echo $HOME")
    assert (trajectory.status, trajectory.error) == ("done", None)
    [start] = [call for call in fake.calls if call[0] == "run"]
    text = " ".join(start)
    for part in (
        "--network none",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--memory 512m --memory-swap 512m",
        "--cpus 2",
        "--pids-limit 99",
        "--rm",
        f"--label {OWNER_LABEL}=",
    ):
        assert part in text
    assert not {"--volume", "-v", "--mount", "--privileged"} & set(start)
    name = start[start.index("--name") + 1]
    commands = [call for call in fake.calls if call[0] == "exec"]
    agent = next(call for call in commands if call[-1] == "ls; echo $HOME")
    assert agent[1:3] == ["--user", "1000:1000"] and agent[agent.index("--workdir") + 1] == "/app"
    copies = [call for call in fake.calls if call[0] == "cp"]
    assert copies == [["cp", f"{tmp_path}/tasks/add/tests/.", f"{name}:/tests"]]
    assert [call for call in fake.calls if call[0] in ("kill", "rm")] == [["kill", name], ["rm", "-f", name]]
    assert environment.run_metrics()["containers/removed"] == 1.0


def test_the_network_is_an_option_and_images_are_built_once(tmp_path: Path) -> None:
    fake = FakeRuntime(tmp_path / "fake")
    fake.answer("image", "", 1)
    fake.answer("exec", "1")
    write_harbor_task(tmp_path / "tasks" / "add")
    environment = ContainerAdapter.from_options(
        options(tmp_path / "tasks", fake.command, network=True)
    ).as_environment()

    async def several() -> None:
        plays = (play(environment(Task("add", "?")), FakeChat(), messages("ls")) for _ in range(3))
        await asyncio.gather(*plays)

    asyncio.run(several())
    assert len([call for call in fake.calls if call[0] == "build"]) == 1
    starts = [call for call in fake.calls if call[0] == "run"]
    assert len(starts) == 3 and not any("none" in call for call in starts)
    assert len([call for call in fake.calls if call[0] == "ps"]) == 1  # one sweep per run


def test_a_container_that_does_not_start_drops_the_episode(tmp_path: Path) -> None:
    fake = FakeRuntime(tmp_path / "fake")
    fake.answer("run", "no space left on device", 125)
    write_harbor_task(tmp_path / "tasks" / "add")
    environment = ContainerAdapter.from_options(options(tmp_path / "tasks", fake.command)).as_environment()
    trajectory = episode(environment, "add", "ls")
    assert trajectory.status == "tool_failure" and trajectory.reward is None
    assert "no space left on device" in (trajectory.error or "")


def test_long_commands_and_outputs_are_limited(tmp_path: Path) -> None:
    fake = FakeRuntime(tmp_path / "fake")
    write_harbor_task(tmp_path / "tasks" / "add")
    environment = ContainerAdapter.from_options(
        options(tmp_path / "tasks", fake.command, max_output=100)
    ).as_environment()
    fake.answer("exec", "x" * 300_000)
    found = outputs(episode(environment, "add", "cat big", "echo " + "y" * 200_000, "a\0b"))
    assert len(found[0]) < 200 and "characters cut" in found[0]
    assert "at most 100000 bytes" in found[1] and "NUL" in found[2]


@pytest.mark.parametrize("is_dead", [True, False])
def test_containers_of_dead_processes_are_swept(tmp_path: Path, is_dead: bool) -> None:
    fake = FakeRuntime(tmp_path / "fake")
    fake.answer("ps", "c1\n")
    host, pid, start = make_owner_id().rsplit(":", 2)
    fake.answer("inspect", f"{host}:{pid}:{int(start) - is_dead}\n")  # a process id that is used again
    runtime = ContainerRuntime([fake.command])
    asyncio.run(runtime.remove_orphans())
    removed = [["rm", "-f", "c1"]] if is_dead else []
    assert [call for call in fake.calls if call[0] == "rm"] == removed
    assert runtime.event_counts["swept"] == is_dead


def test_a_recording_replays_without_containers(tmp_path: Path) -> None:
    fake = FakeRuntime(tmp_path / "fake")
    fake.answer("exec", "1")
    for number in range(4):
        write_harbor_task(tmp_path / "tasks" / f"add-{number}")
    environment = {"environment_id": "containers", "options": options(tmp_path / "tasks", fake.command)}
    config = TrainingConfig(
        environment=environment | {"max_turns": 2},
        training={"max_steps": 1, "batch_size": 2, "group_size": 2},
        sampling={"max_tokens": 4},
        logging={"output_dir": str(tmp_path / "runs")},
    )
    Training(config, name="live", watcher=Quiet()).train()
    started = len([call for call in fake.calls if call[0] == "run"])
    report = Training(config, name="again", watcher=Quiet(), replay=str(tmp_path / "runs" / "live")).train()
    assert report.state == "finished"
    assert len([call for call in fake.calls if call[0] == "run"]) == started > 0
    lives = [json.loads(line)["reward"] for line in (tmp_path / "runs/live/trajectories.jsonl").open()]
    agains = [json.loads(line)["reward"] for line in (tmp_path / "runs/again/trajectories.jsonl").open()]
    assert lives == agains and {reward["outcome"] for reward in lives} == {1.0}


# -- a real podman


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("podman")
    command = podman(folder)
    yield command
    subprocess.run([*command.split(), "rm", "-f", "-a"], capture_output=True, timeout=120)


@pytest.mark.slow
def test_the_reference_solution_earns_more_than_junk_in_both_formats(tmp_path: Path, real: str) -> None:
    write_harbor_task(tmp_path / "harbor")
    write_terminal_bench_task(tmp_path / "bench")
    environment = ContainerAdapter.from_options(options(tmp_path, real)).as_environment()
    for name, junk in (("harbor", 0.25), ("bench", 0.0)):
        rewards = [episode(environment, name, expert=True).reward, episode(environment, name, "ls").reward]
        assert [reward and reward.outcome for reward in rewards] == [1.0, junk]
    assert _containers(real) == []


@pytest.mark.slow
def test_a_container_confines_the_agent(tmp_path: Path, real: str) -> None:
    write_harbor_task(tmp_path / "add")
    environment = ContainerAdapter.from_options(
        options(tmp_path, real, command_timeout=5, memory_mb=64, pids=40)
    ).as_environment()
    found = outputs(
        episode(
            environment,
            "add",
            "id -u; ls /sys/class/net",
            "grep CapEff /proc/self/status",
            "sleep 100 & sleep 100",
            "ps | grep -c 'sleep 10[0]'",
            "echo 42 > number; mkdir -p /tests; ls /tests /logs",
            "n=0; while [ $n -lt 100 ]; do sleep 3 & n=$((n+1)); done; echo started",
            "head -c 200000000 /dev/zero | tail -c 190000000 | wc -c",
            "cat /etc/shadow; ls /root",
        )
    )
    assert found[0] == "1000\nlo\n" and "0000000000000000" in found[1]
    assert "timed out after 5 seconds" in found[2] and found[3].startswith("0")
    assert "denied" in found[4]
    assert "started" not in found[5] or "fork" in found[5]
    assert "190000000" not in found[6]
    assert _containers(real) == []


@pytest.mark.slow
def test_containers_of_a_killed_run_are_removed_by_the_next(tmp_path: Path, real: str) -> None:
    write_harbor_task(tmp_path / "add")
    code = f"""
import asyncio, os
from TrainingFactory.envs.containers.environment import ContainerAdapter
from TrainingFactory.types import Task

async def main():
    environment = ContainerAdapter.from_options({options(tmp_path, real)!r}).as_environment()(Task("add", "?"))
    await environment.run_command("ls")
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == -9
    assert len(_containers(real)) == 1
    environment = ContainerAdapter.from_options(options(tmp_path, real)).as_environment()
    assert episode(environment, "add", "ls").reward is not None
    assert _containers(real) == [] and environment.run_metrics()["containers/swept"] == 1.0


@pytest.mark.slow
def test_a_run_trains_in_real_containers(tmp_path: Path, real: str) -> None:
    for number in range(4):
        write_harbor_task(tmp_path / "tasks" / f"add-{number}")
    config = TrainingConfig(
        environment={"max_turns": 2},
        training={"max_steps": 1, "batch_size": 1, "group_size": 2},
        sampling={"max_tokens": 4},
        logging={"output_dir": str(tmp_path / "runs")},
    )
    environment = ContainerAdapter.from_options(
        options(tmp_path / "tasks", real, heldout=None)
    ).as_environment()
    [row] = (
        Training(config, name="run", objects=UserObjects(environment=environment), watcher=Quiet())
        .train()
        .rows
    )
    assert row["containers/started"] == row["containers/removed"] == 2.0
    assert _containers(real) == []


def _containers(command: str) -> list[str]:
    listing = subprocess.run([*command.split(), "ps", "-a", "-q"], capture_output=True, text=True, check=True)
    return listing.stdout.split()
