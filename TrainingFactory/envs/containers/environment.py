"""The environment `containers`: each episode has a container of its own, in which the tool `bash` acts and the task's
tests compute the reward. Work in the container goes through tools, so that recording and replay are those of tools."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.common.options import STRICT, Count, Positive, Text, make_from
from TrainingFactory.envs.base import ForeignEnvironment, ToolEnvironment
from TrainingFactory.envs.builtin.splits import in_split
from TrainingFactory.envs.containers.runtime import (
    Container,
    ContainerError,
    ContainerRuntime,
    Limits,
    find_runtime,
)
from TrainingFactory.envs.containers.tasks import ContainerTask, read_task_folders
from TrainingFactory.protocols import Episode
from TrainingFactory.tools.options import ToolOptions
from TrainingFactory.types import Message, Reward, Task, ToolCall, ToolResult, ToolSpec

SYSTEM_PROMPT = (
    "You work in a Linux container. Do the task with the tool bash, then answer without a tool call: tests check the "
    "container, not your answer."
)
TESTS_TOOL = "container.tests"  # the hidden tool that runs the tests
AGENT_USER = "1000:1000"
ROOT_USER = "0"
MAX_COMMAND_BYTES = 100_000  # the kernel limits one argument to 128 KiB
REWARD_FILES = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
MAX_REWARD_CHARS = 10_000


@checked_dataclass(config=STRICT, frozen=True)
class ContainerOptions:
    """`environment.options` of the environment `containers`."""

    tasks: Text
    """Folder with task folders of Harbor or Terminal-Bench."""
    heldout: Text | None = None
    """Folder with held-out tasks. None: a fifth of the tasks, by a hash of their names."""
    runtime: Text | None = None
    """Command of the container runtime, with its options. None: podman, else docker."""
    network: bool = False
    """Give containers a network. Images are built with the network in any case."""
    user: Text | None = None
    """User of the agent's commands, such as root. None: the task's, else 1000:1000, who owns the working directory."""
    cpus: Positive | None = None
    """CPU cores of a container. None: the task's, else 1."""
    memory_mb: Count | None = None
    """Memory of a container, in MB. None: the task's, else 2048."""
    pids: Count = 256
    """Maximum number of processes in a container."""
    command_timeout: Positive = 60.0
    """Seconds for one command of the agent."""
    max_output: Count = 20_000
    """Characters of a command's output that the agent gets; the middle of a longer one is left out."""
    lifetime: Positive = 7200.0
    """Seconds after which a container ends by itself, if nothing removes it."""
    max_episodes: Count = 8
    """Maximum number of concurrent episodes."""


class BashTool:
    """The tool `bash` of one episode."""

    def __init__(self, environment: ContainerEnvironment) -> None:
        self._environment = environment
        summary = "Run a shell command in the container. Each command starts in the same working directory."
        parameters = {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
            "additionalProperties": False,
        }
        self.spec = ToolSpec("bash", summary, parameters)
        # The command's own timeout ends its processes; this one is for a runtime that hangs.
        self.options = ToolOptions(
            timeout=environment.start_seconds + environment.options.command_timeout, ordered=True
        )

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await self._environment.run_command(arguments["command"])


class TestsTool:
    """The tool that runs the task's tests. The agent cannot call it."""

    def __init__(self, environment: ContainerEnvironment) -> None:
        self._environment = environment
        self.spec = ToolSpec(TESTS_TOOL, parameters={"type": "object"})
        timeout_seconds = environment.start_seconds + environment.container_task.test_seconds
        self.options = ToolOptions(timeout=timeout_seconds)

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return await self._environment.run_tests()


class ContainerEnvironment(ToolEnvironment):
    """One episode in a container, which starts with the first command."""

    system_prompt = SYSTEM_PROMPT
    fork = None
    runtime: ClassVar[ContainerRuntime]
    options: ClassVar[ContainerOptions]
    container_tasks: ClassVar[Mapping[str, ContainerTask]]  # by id
    max_episodes: ClassVar[int]
    orphan_removal_tasks: ClassVar[list[asyncio.Task[None]]]  # the first container of a run waits for it

    def __init__(self, task: Task) -> None:
        task_folder = str(task.metadata.get("task_folder", task.id))
        if task_folder not in self.container_tasks:
            raise ValueError(f"task {task.id} names no folder of environment.options.tasks: {task_folder}")
        self.container_task = self.container_tasks[task_folder]
        super().__init__(task, [BashTool(self)])
        self._container: Container | None = None
        self._workdir = self.container_task.workdir
        self._start_lock = asyncio.Lock()

    @property
    def start_seconds(self) -> float:
        """Return the seconds allowed for building the image and starting a container."""
        return self.container_task.build_seconds + 120.0

    @property
    def user(self) -> str:
        return self.options.user or self.container_task.user or AGENT_USER

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
        return islice(_find_tasks(cls.options, cls.container_tasks, split), count)

    @classmethod
    def run_metrics(cls) -> dict[str, float]:
        event_counts, cls.runtime.event_counts = cls.runtime.event_counts, type(cls.runtime.event_counts)()
        counter_names = ("started", "removed", "built", "swept", "timeouts")
        return {f"containers/{name}": float(event_counts[name]) for name in counter_names}

    async def run_command(self, command: str) -> ToolResult:
        if len(command.encode(errors="replace")) > MAX_COMMAND_BYTES or "\0" in command:
            note = f"The command must have at most {MAX_COMMAND_BYTES} bytes and no NUL character."
            return ToolResult(note, ok=False, error="exception")
        timeout = self.options.command_timeout
        try:
            container = await self._start_container()
            result = await container.execute(
                command, timeout=timeout, user=self.user, workdir=self._workdir, env={"HOME": "/tmp"}
            )
        except ContainerError as error:
            return ToolResult(str(error), ok=False, error="unavailable")
        if result.status is None:
            self.runtime.event_counts["timeouts"] += 1
            note = f"{result.output}\n[timed out after {timeout:g} seconds; all your processes were killed]"
            return ToolResult(note.strip(), ok=False, error="exception")
        if result.status:
            return ToolResult(
                f"{result.output}\n[exit status {result.status}]".strip(), ok=False, error="exception"
            )
        return ToolResult(result.output or "[no output]")

    async def run_tests(self) -> ToolResult:
        task = self.container_task
        try:
            container = await self._start_container()
            await container.kill_processes(self.user)
            await container.execute(
                "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier", timeout=60.0
            )
            for path in task.test_paths:
                await container.copy_into(path, "/tests")
            timeout = task.test_seconds
            result = await container.execute(
                f'"${{BASH:-sh}}" {task.test_script}',
                timeout=timeout,
                workdir=self._workdir,
                env=task.test_env,
            )
            reading = None
            if task.writes_reward:
                reading = await container.execute(
                    f"cat {REWARD_FILES[0]} 2>/dev/null || cat {REWARD_FILES[1]}", timeout=60.0
                )
        except ContainerError as error:
            return ToolResult(str(error), ok=False, error="unavailable")
        reward_text = None if reading is None or reading.status else reading.output[:MAX_REWARD_CHARS]
        return ToolResult(
            json.dumps({"status": result.status, "reward": reward_text, "output": result.output[-2000:]})
        )

    async def reward(self, episode: Episode) -> Reward:
        """Return the score of the task's tests."""
        test_executor = self.executor.hidden([TestsTool(self)], 60.0, 1_000_000)
        with test_executor.measure("tests"):
            [result] = await test_executor.batch_execute([ToolCall(TESTS_TOOL)])
        if not result.ok:
            raise ValueError(f"the tests could not run: {result.content}")
        report = json.loads(result.content)
        if report["status"] is None:
            raise ValueError(f"the tests took longer than {self.container_task.test_seconds:g} s")
        if self.container_task.writes_reward:
            return read_reward(report["reward"], report["output"])
        return Reward(float(report["status"] == 0))

    def expert(self) -> Iterator[Message]:
        """Yield the turns of the reference solution: the task's solution script as one command."""
        script_path = self.container_task.solution_file
        if script_path is None:
            raise ValueError(f"{self.container_task.folder} has no solution script")
        command = script_path.read_text(encoding="utf-8")
        yield Message("assistant", tool_calls=[ToolCall("bash", {"command": command})])
        yield Message("assistant", "Done.")

    async def _start_container(self) -> Container:
        """Return the episode's container; the first call starts it."""
        async with self._start_lock:
            if self._container is None:
                await self._remove_orphans()
                task, options = self.container_task, self.options
                image = task.image_name
                if image is None:
                    tag, context_folder = task.make_image_tag(), task.context_folder
                    assert context_folder is not None
                    image = await self.runtime.build_image(tag, context_folder, task.build_seconds)
                limits = Limits(
                    options.cpus or task.cpus or 1.0,
                    options.memory_mb or task.memory_mb or 2048,
                    options.pids,
                    options.network,
                    options.lifetime,
                )
                self._container = await self.runtime.start_container(image, limits, task.workdir, task.env)
                self._workdir = task.workdir or await self._container.read_workdir()
                await self._chown_workdir(self._container)
            return self._container

    async def _chown_workdir(self, container: Container) -> None:
        if self._workdir != "/" and self.user not in ("root", ROOT_USER):
            command = f'chown -R {self.user} "$PWD"'
            result = await container.execute(command, timeout=60.0, workdir=self._workdir)
            if result.status:
                raise ContainerError(
                    f"{self._workdir} cannot be given to user {self.user}: {result.output[-200:]}"
                )

    async def _remove_orphans(self) -> None:
        """Remove containers of ended processes, once per run."""
        if not self.orphan_removal_tasks:
            self.orphan_removal_tasks.append(asyncio.ensure_future(self.runtime.remove_orphans()))
        await asyncio.shield(self.orphan_removal_tasks[0])

    async def close(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            await asyncio.shield(asyncio.ensure_future(container.remove()))


class ContainerAdapter(ForeignEnvironment):
    """Adapter that makes the environment class for a config's `environment.options`."""

    def __init__(self, options: ContainerOptions) -> None:
        self.options = options
        folders = [Path(name).expanduser() for name in (options.tasks, options.heldout) if name is not None]
        tasks = [task for folder in folders for task in read_task_folders(folder)]
        self.container_tasks = {task.id: task for task in tasks}
        if len(self.container_tasks) < len(tasks):
            raise ValueError(
                f"{options.heldout} has a task with the name of one in {options.tasks}; rename it"
            )
        self.runtime = ContainerRuntime(find_runtime(options.runtime), options.max_output)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        return cls(make_from(ContainerOptions, options, "environment.options"))

    def as_environment(self) -> type[ContainerEnvironment]:
        members = {
            "runtime": self.runtime,
            "options": self.options,
            "container_tasks": self.container_tasks,
            "max_episodes": self.options.max_episodes,
            "orphan_removal_tasks": [],
        }
        return type("containers", (ContainerEnvironment,), members)


def _find_tasks(options: ContainerOptions, tasks: Mapping[str, ContainerTask], split: str) -> Iterator[Task]:
    heldout_folder = None if options.heldout is None else Path(options.heldout).expanduser().resolve()
    for task in tasks.values():
        if heldout_folder is None:
            is_selected = in_split(task.id, split)
        else:
            is_selected = task.folder.is_relative_to(heldout_folder) == (split == "heldout")
        if is_selected:
            yield Task(task.id, task.instruction, metadata={"task_folder": task.id})


def read_reward(reward_text: str | None, output: str) -> Reward:
    """Return the reward that tests have written: a number, or an object of numbers, whose `reward` is the outcome."""
    if reward_text is None or not reward_text.strip():
        raise ValueError(f"the tests wrote no reward to {' or '.join(REWARD_FILES)}: {output[-300:]}")
    try:
        scores = json.loads(reward_text)
    except ValueError as error:
        raise ValueError(f"the tests wrote a reward that is no number: {reward_text[:80]!r}") from error
    scores = scores if isinstance(scores, dict) else {"reward": scores}
    for name, value in scores.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the tests wrote a reward that is no number: {name} is {value!r:.80}")
    if "reward" not in scores and len(scores) != 1:
        raise ValueError(f"the tests wrote no `reward` among {', '.join(scores) or 'nothing'}")
    outcome = scores["reward"] if "reward" in scores else next(iter(scores.values()))
    return Reward(
        float(outcome), parts={name: float(value) for name, value in scores.items() if name != "reward"}
    )
