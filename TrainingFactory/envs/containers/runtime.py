"""Containers through the command line of podman or docker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shlex
import shutil
import socket
import subprocess
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from TrainingFactory.common.texts import truncate_middle

RUNTIME_PROGRAMS = ("podman", "docker")
OWNER_LABEL = "tfactory.owner"  # HOST:PID:START of the process that started a container
PROBE_TIMEOUT_SECONDS = 60.0
COMMAND_TIMEOUT_SECONDS = 120.0  # for starting, copying and removing
CHUNK_BYTES = 65536
# Root in the container prepares files and runs the tests; the agent's user has no capabilities at all.
KEPT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
# The command is an argument, so that no quoting is needed.
SHELL_COMMAND = (
    "sh",
    "-c",
    'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi',
    "sh",
)
# The first process: it reaps processes whose parents have ended, and ends after a number of 10 seconds.
WAIT_SCRIPT = 'n=0; while [ $n -lt "$1" ]; do sleep 10 & wait; n=$((n+1)); done'
# The runtimes' own defaults are above what an unprivileged process may set. `--pids-limit` limits the processes of one
# container; nproc counts those of the user on the whole machine.
ULIMITS = {"nofile": 4096, "nproc": 16384}
RUNTIME_FAILED_STATUS = 125  # exit status of podman and docker if they could not run the command


class ContainerError(Exception):
    """Raised if the container runtime fails; the text gives the reason."""


class CommandResult(NamedTuple):
    status: int | None  # None: timed out
    output: str  # of stdout and stderr together


@dataclass(slots=True, frozen=True)
class Limits:
    """Limits of one container."""

    cpus: float = 1.0
    memory_mb: int = 2048
    pids: int = 256
    network: bool = False
    lifetime: float = 7200.0  # seconds after which the container ends by itself


@dataclass(eq=False)
class ContainerRuntime:
    """A runtime's command, such as `podman` or `podman --runtime runc`. `max_output` is the number of characters of a
    command's output that are kept."""

    command: Sequence[str]
    max_output: int = 20_000
    event_counts: Counter[str] = field(default_factory=Counter)
    _builds: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.command[0]

    async def build_image(self, tag: str, context_folder: Path, timeout: float) -> str:
        """Build an image, unless it exists; episodes of the same task wait for one build."""
        if tag not in self._builds or (self._builds[tag].done() and _has_failed(self._builds[tag])):
            self._builds[tag] = asyncio.ensure_future(self._run_build(tag, context_folder, timeout))
        await asyncio.shield(self._builds[tag])
        return tag

    async def _run_build(self, tag: str, context_folder: Path, timeout: float) -> None:
        if (await self.run("image", "inspect", tag)).status == 0:
            return
        self.event_counts["built"] += 1
        result = await self.run("build", "-t", tag, str(context_folder), timeout=timeout)
        if result.status != 0:
            reason = "took too long" if result.status is None else "failed"
            raise ContainerError(f"building {context_folder} {reason}: {_quote_tail(result.output)}")

    async def start_container(
        self, tag: str, limits: Limits, workdir: str | None = None, env: Mapping[str, str] | None = None
    ) -> Container:
        container_name = f"tfactory-{uuid.uuid4().hex[:16]}"
        result = await self.run(*make_start_arguments(container_name, tag, limits, workdir, env or {}))
        if result.status != 0:
            await self.run("rm", "-f", container_name)
            raise ContainerError(
                f"{self.name} could not start a container of {tag}: {_quote_tail(result.output)}"
            )
        self.event_counts["started"] += 1
        return Container(self, container_name)

    async def remove_orphans(self) -> None:
        """Remove containers whose process on this machine has ended, such as after `kill -9`."""
        listing = await self.run("ps", "-a", "-q", "--filter", f"label={OWNER_LABEL}")
        for container_id in listing.output.split() if listing.status == 0 else ():
            label_format = f'{{{{index .Config.Labels "{OWNER_LABEL}"}}}}'
            inspect_result = await self.run("inspect", "--format", label_format, container_id)
            if inspect_result.status == 0 and not _is_owner_alive(inspect_result.output.strip()):
                self.event_counts["swept"] += 1
                await self.run("rm", "-f", container_id)

    async def run(
        self, *arguments: str, timeout: float = COMMAND_TIMEOUT_SECONDS, max_output: int | None = None
    ) -> CommandResult:
        """Run a command of the runtime; kill it after `timeout` seconds."""
        process = await asyncio.create_subprocess_exec(
            *self.command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        output = _OutputBuffer(max_output or self.max_output)
        try:
            async with asyncio.timeout(timeout):
                assert process.stdout is not None
                while chunk := await process.stdout.read(CHUNK_BYTES):
                    output.add(chunk)
                await process.wait()
        except TimeoutError:
            return CommandResult(None, output.to_text())
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return CommandResult(process.returncode, output.to_text())


@dataclass(slots=True)
class Container:
    """A running container, controlled through its runtime's command."""

    runtime: ContainerRuntime
    name: str

    async def execute(
        self,
        command: str,
        *,
        timeout: float,
        user: str = "0",
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a shell command; after `timeout` seconds, kill all processes of its user."""
        workdir_args = [] if workdir is None else ["--workdir", workdir]
        env_args = [arg for key, value in (env or {}).items() for arg in ("--env", f"{key}={value}")]
        arguments = ("exec", "--user", user, *workdir_args, *env_args, self.name, *SHELL_COMMAND, command)
        result = await self.runtime.run(*arguments, timeout=timeout)
        if result.status is None:
            await self.kill_processes(user)
        elif result.status == RUNTIME_FAILED_STATUS and not await self.is_running():
            raise ContainerError(f"the container has ended: {_quote_tail(result.output)}")
        return result

    async def kill_processes(self, user: str) -> None:
        """Kill all processes of a user in the container, except its first process."""
        await self.runtime.run("exec", "--user", user, self.name, "sh", "-c", "kill -9 -1")

    async def is_running(self) -> bool:
        result = await self.runtime.run("inspect", "--format", "{{.State.Running}}", self.name)
        return result.status == 0 and result.output.strip() == "true"

    async def copy_into(self, path: Path, folder: str) -> None:
        """Copy a file, or the contents of a folder, into a folder of the container."""
        source_path = f"{path}/." if path.is_dir() else str(path)
        result = await self.runtime.run("cp", source_path, f"{self.name}:{folder}")
        if result.status != 0:
            raise ContainerError(f"copying {path} into the container failed: {_quote_tail(result.output)}")

    async def read_workdir(self) -> str:
        """Return the working directory of the image."""
        result = await self.runtime.run("inspect", "--format", "{{json .Config.WorkingDir}}", self.name)
        try:
            return str(json.loads(result.output) or "/")
        except ValueError:
            return "/"

    async def remove(self) -> None:
        self.runtime.event_counts["removed"] += 1
        await self.runtime.run("kill", self.name)  # `rm` alone waits ten seconds for the processes to end
        await self.runtime.run("rm", "-f", self.name)


def make_start_arguments(
    name: str, tag: str, limits: Limits, workdir: str | None, env: Mapping[str, str]
) -> list[str]:
    """Return the arguments of `podman run` or `docker run`: no network unless `limits` allow it, no mounts, few
    capabilities, and the limits."""
    arguments = ["run", "--detach", "--rm", "--name", name, "--label", f"{OWNER_LABEL}={make_owner_id()}"]
    arguments += [] if limits.network else ["--network", "none"]
    arguments += ["--cap-drop", "ALL", *(arg for cap in KEPT_CAPABILITIES for arg in ("--cap-add", cap))]
    arguments += ["--security-opt", "no-new-privileges", "--user", "0"]
    memory_limit = f"{limits.memory_mb}m"
    arguments += ["--memory", memory_limit, "--memory-swap", memory_limit, "--cpus", f"{limits.cpus:g}"]
    arguments += ["--pids-limit", f"{limits.pids}"]
    for limit_name, limit in ULIMITS.items():
        arguments += _make_ulimit_args(limit_name, limit)
    arguments += [] if workdir is None else ["--workdir", workdir]
    arguments += [arg for key, value in env.items() for arg in ("--env", f"{key}={value}")]
    num_sleeps = f"{max(1, round(limits.lifetime / 10))}"
    return [*arguments, "--entrypoint", "sh", tag, "-c", WAIT_SCRIPT, "sh", num_sleeps]


def _make_ulimit_args(name: str, limit: int) -> list[str]:
    """Return the arguments for a limit, capped at this process's hard limit, which the runtime cannot exceed."""
    hard_limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    capped_limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
    return ["--ulimit", f"{name}={capped_limit}:{capped_limit}"]


def find_runtime(command: str | None) -> list[str]:
    """Return the command of a runtime that can start containers on this machine; raise ValueError if there is none."""
    candidates = [shlex.split(command)] if command else [[name] for name in RUNTIME_PROGRAMS]
    installed_commands = [candidate for candidate in candidates if candidate and shutil.which(candidate[0])]
    if not installed_commands:
        problem = f"{command!r} is not a program" if command else "neither podman nor docker is installed"
        raise ValueError(
            f"containers need a runtime, and {problem}: install podman, or set environment.options.runtime"
        )
    reasons = []
    for candidate in installed_commands:
        reason = _find_runtime_problem(candidate)
        if reason is None:
            return candidate
        reasons.append(f"{shlex.join(candidate)}: {reason}")
    raise ValueError(
        f"no container runtime works here ({'; '.join(reasons)}): start it, or set environment.options.runtime"
    )


def _find_runtime_problem(command: Sequence[str]) -> str | None:
    try:
        process = subprocess.run(
            [*command, "info"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if process.returncode == 0 else _quote_tail(process.stderr or process.stdout)


def make_owner_id() -> str:
    """Return a name of this process that no later process can have."""
    return f"{socket.gethostname()}:{os.getpid()}:{int(psutil.Process().create_time())}"


def _is_owner_alive(owner_id: str) -> bool:
    """Return whether the process that started a container may still be alive. Always True for a process of another
    machine, because it cannot be checked here."""
    host, _, process_id = owner_id.partition(":")
    pid, _, start_time = process_id.partition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return True
    try:
        return str(int(psutil.Process(int(pid)).create_time())) == start_time
    except psutil.NoSuchProcess:
        return False


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None


def _quote_tail(text: str, num_lines: int = 3) -> str:
    return truncate_middle(" ".join(text.strip().splitlines()[-num_lines:]), 500)


class _OutputBuffer:
    """Buffer that keeps the beginning and the end of a stream."""

    def __init__(self, max_chars: int) -> None:
        self._max_bytes_per_end = max_chars * 2  # in bytes: a character has up to four
        self._head, self._tail = bytearray(), bytearray()
        self._max_chars, self._num_bytes = max_chars, 0

    def add(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        free_bytes = self._max_bytes_per_end - len(self._head)
        self._head += chunk[:free_bytes]
        self._tail += chunk[free_bytes:] if free_bytes > 0 else chunk
        del self._tail[: -self._max_bytes_per_end]

    def to_text(self) -> str:
        num_omitted = self._num_bytes - len(self._head) - len(self._tail)
        gap = f"\n[{num_omitted} bytes omitted]\n".encode() if num_omitted else b""
        return truncate_middle(bytes(self._head + gap + self._tail).decode(errors="replace"), self._max_chars)
