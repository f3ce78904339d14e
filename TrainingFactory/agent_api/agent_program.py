"""A user's own agent program as an environment. Each episode starts the program with an endpoint address and a key; the
program uses its own tools and reports the episode's reward."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.agent_api.agent_endpoint import AgentEndpoint, EpisodeRequests, ReportedReward, new_key
from TrainingFactory.common.options import STRICT, Count, Text, make_from
from TrainingFactory.common.texts import MAX_ERROR_CHARS, escape_control, redact
from TrainingFactory.data.trajectories import trajectory_to_dict
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Episode, Sampler
from TrainingFactory.rewards.adapt import Unscored
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Task, Trajectory

# Environment variables that every program inherits, besides those in `env`: enough to start, and no secrets.
INHERITED = "HOME LANG LC_ALL LD_LIBRARY_PATH LOGNAME PATH SHELL TERM TMPDIR TZ USER".split()
SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}  # real-time signals have no names
MAX_PROCESSES = 16  # default of environment.options.processes
POLL = 0.02  # seconds between two checks of a running program
MAX_OUTPUT_BYTES = 64 * 2**20  # maximum bytes on stdout or stderr
OUTPUT_TAIL_BYTES = 64 * 1024  # bytes read from the end of an output file
KILL_SECONDS = 10.0  # for a killed program to end; then the run continues without it
log = logging.getLogger(__name__)


class ProgramFailed(Exception):
    """An error of the user's program, which ends its episode and not the run."""


@checked_dataclass(config=STRICT, frozen=True)
class ProgramOptions:
    """environment.options of a command: working directory, environment variables to pass on, maximum processes."""

    cwd: str = "."
    env: list[Text] = Field(default_factory=list)
    processes: Count = MAX_PROCESSES


class AgentProgram:
    """Environment factory: each episode runs the command once. All episodes share one endpoint."""

    def __init__(self, command: str, options: Mapping[str, Any]) -> None:
        self.options: ProgramOptions = make_from(ProgramOptions, options, "environment.command")
        try:
            self.argv, self.cwd = shlex.split(command), Path(self.options.cwd).expanduser().resolve()
        except ValueError as error:
            raise ValueError(f"environment.command={command}: {error}") from error
        name = self.argv[0] if self.argv else ""
        if shutil.which(str(self.cwd / name) if "/" in name else name) is None:
            text = f"cannot find the program {name!r} of environment.command"
            raise ValueError(f"{text}: it is neither on the PATH nor at {self.cwd / name}")
        if missing := [name for name in self.options.env if name not in os.environ]:
            raise ValueError(f"environment.options.env: {', '.join(missing)} is not set. Set or remove it")
        self.endpoint = AgentEndpoint()

    def __call__(self, task: Task) -> ProgramEpisode:
        return ProgramEpisode(task, self)

    def tasks(self, split: str, seed: int, count: int) -> Iterable[Task]:
        key = "heldout" if split == "heldout" else "tasks"
        raise ValueError(f"environment.command generates no tasks. Set data.{key}=FILE.jsonl")


class SelfScoredEpisode(ToolEnvironment):
    """An episode whose client reports the reward itself, at an endpoint and under a key."""

    reported_reward: ReportedReward | None = None
    missing_reason = "no reward was posted"  # error if `reported_reward` is None

    def __init__(self, task: Task, endpoint: AgentEndpoint, key: str) -> None:
        super().__init__(task)
        self.endpoint, self.key = endpoint, key

    def reward(self, episode: Episode) -> Reward:
        if self.reported_reward is None or self.reported_reward.reward is None:
            raise Unscored(self.missing_reason)
        return Reward(self.reported_reward.reward, parts=self.reported_reward.parts)


class ProgramEpisode(SelfScoredEpisode):
    """An episode played by one process of the user's program."""

    missing_reason = 'the program neither printed a line of JSON with "reward" nor posted a reward'

    def __init__(self, task: Task, program: AgentProgram) -> None:
        super().__init__(task, program.endpoint, new_key())
        self._program = program

    async def play(self, calls: EpisodeRequests) -> None:
        """Run the program until it exits; raise ProgramFailed if it fails. No process is left running in any case."""
        inherited = {name: os.environ.get(name) for name in (*INHERITED, *self._program.options.env)}
        with contextlib.ExitStack() as stack:
            # Unnamed files, not pipes, because a child of the program can keep a pipe open forever.
            stdout, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            lifeline, our_end = os.pipe()
            for end in (lifeline, our_end):
                stack.callback(os.close, end)
            folder = tempfile.TemporaryDirectory(prefix="tfactory-episode-", ignore_cleanup_errors=True)
            file = Path(stack.enter_context(folder), "task.json")
            row = trajectory_to_dict(Trajectory(self.task, group=""))["task"]
            file.write_text(json.dumps(row, default=str), encoding="utf-8")
            base_url = self.endpoint.base_url
            endpoint_variables = {
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_BASE": base_url,
                "OPENAI_API_KEY": self.key,
            }
            endpoint_variables |= {"TFACTORY_TASK": str(file), "NO_PROXY": "127.0.0.1,localhost"}
            env = {name: value for name, value in inherited.items() if value is not None} | endpoint_variables
            try:
                status = await self._run(env, lifeline, stack.enter_context(file.open("rb")), stdout, err)
            except OSError as error:
                raise ProgramFailed(f"the program cannot be started: {error.strerror}") from error
            self._read(_end_of(stdout), calls)
            if status:
                exit_reason = (
                    f"status {status}" if status > 0 else SIGNAL_NAMES.get(-status, f"signal {-status}")
                )
                secrets = [self.key, *(env[name] for name in self._program.options.env if len(env[name]) > 3)]
                lines = redact(_end_of(err), secrets).split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "nothing on stderr")
                raise ProgramFailed(
                    f"the program ended with {exit_reason}: {escape_control(last.strip())[-MAX_ERROR_CHARS:]}"
                )

    async def _run(self, env: dict[str, str], lifeline: int, stdin: Any, *outputs: Any) -> int:
        """Return the exit status. The process group is killed at the end, also if this process dies (`lifeline`)."""
        from TrainingFactory.common.workers.child import kill_at_hangup  # not available on Windows

        options: dict[str, Any] = {"cwd": self._program.cwd, "env": env, "pass_fds": [lifeline]}
        args = (self._program.argv, -1, None, stdin, *outputs)
        process = subprocess.Popen(*args, **options, start_new_session=True)  # in its own process group
        try:
            kill_at_hangup(lifeline, process.pid)
            while process.poll() is None:
                await asyncio.sleep(POLL)
                if any(os.fstat(file.fileno()).st_size > MAX_OUTPUT_BYTES for file in outputs):
                    raise ProgramFailed(f"the program wrote more than {MAX_OUTPUT_BYTES} bytes")
            return process.returncode
        finally:
            try:
                async with asyncio.timeout(KILL_SECONDS):
                    await in_thread(_kill, process, env["TFACTORY_TASK"])
            except TimeoutError:
                log.warning("process %d of environment.command cannot be killed", process.pid)

    def _read(self, printed: str, calls: EpisodeRequests) -> None:
        """Set the reward from the last printed line that has one, else from the posted reward."""
        self.reported_reward = calls.reported_reward
        for line in reversed([line for line in printed.split("\n") if '"reward"' in line]):
            try:
                self.reported_reward = ReportedReward.model_validate_json(line)
                return
            except ValidationError as error:
                problem = error.errors(include_url=False)[0]
                if problem["type"] not in ("json_invalid", "model_type", "missing"):  # unrelated output
                    self.reported_reward, self.missing_reason = (
                        None,
                        f"the program's reward is invalid: {problem['msg']}",
                    )
                    return


def _kill(process: subprocess.Popen[bytes], task_file: str) -> None:
    """Kill the program's process group. On systems with /proc, also kill processes that left the group, found by their
    TFACTORY_TASK."""
    ignore_errors = contextlib.suppress(OSError)  # the process has ended, or belongs to another user
    with ignore_errors:
        os.killpg(process.pid, signal.SIGKILL)
    for environ in glob.glob("/proc/[0-9]*/environ"):
        with ignore_errors:
            if f"TFACTORY_TASK={task_file}".encode() in Path(environ).read_bytes().split(b"\0"):
                os.kill(int(environ.split("/")[2]), signal.SIGKILL)
    process.wait()


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_TAIL_BYTES))
    return file.read(OUTPUT_TAIL_BYTES).decode(errors="replace")


class ProgramRun(EpisodeRun):
    """An episode whose turns are the requests of a program."""

    def __init__(self, rules: EpisodeSettings, trajectory: Trajectory, sampler: Sampler, *args: Any) -> None:
        super().__init__(rules, trajectory, sampler.session(), sampler.max_length, *args)
        self._sampler = sampler

    async def _turns(self, environment: Any) -> None:
        endpoint, trajectory, problem = environment.endpoint, self.trajectory, None
        calls = EpisodeRequests(self.rules, self._sampler, self.session, self.seed_of, endpoint.counts)
        with endpoint.admitted(environment.key, calls):
            playing = asyncio.ensure_future(environment.play(calls))
            try:
                await asyncio.wait({playing, calls.failed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
                nodes = await calls.close()
                trajectory.turns = [node.turn for node in nodes]
                if nodes:
                    trajectory.prompt, trajectory.tools = nodes[0].messages[:-1], nodes[0].tools
        if not calls.failed.cancelled():
            calls.failed.result()  # raises the sampler's error, which stops the run
        try:
            playing.result()
        except ProgramFailed as error:
            problem = str(error)
        if not nodes:
            self._end("error", problem or "the program made no successful request to OPENAI_BASE_URL")
        elif calls.limited:
            self._end("max_turns", None)
        elif calls.full or nodes[-1].turn.completion.finish == "length":
            self._end("truncated", None)
        else:
            self._end("done" if problem is None else "error", problem)

    def _check(self) -> None:
        """Check nothing: `Conversations` makes each prompt extend the sampled tokens or start a new row."""


class ProgramRollouts(RolloutEngine):
    """Runs episodes of an `AgentProgram`."""

    def _new(self, trajectory: Trajectory, sampler: Sampler, *args: Any) -> EpisodeRun:
        return ProgramRun(self.rules, trajectory, sampler, *args)
