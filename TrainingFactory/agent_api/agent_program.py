"""A user's own agent as an environment: for each episode its program is started with an address and a key, plays with
its own tools, and says at its end what the episode was worth."""

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

from TrainingFactory.agent_api.agent_endpoint import Calls, Endpoint, Given, new_key
from TrainingFactory.common.options import STRICT, Count, Text, make_from
from TrainingFactory.common.texts import MAX_ERROR_CHARS, clean, without
from TrainingFactory.data.trajectories import trajectory_to_dict
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Episode, Sampler
from TrainingFactory.rewards.adapt import Unscored
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.rollout.episode import EpisodeRules, EpisodeRun
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Task, Trajectory

# What a program gets of our environment besides what `env` names: enough to start, and nothing secret.
INHERITED = "HOME LANG LC_ALL LD_LIBRARY_PATH LOGNAME PATH SHELL TERM TMPDIR TZ USER".split()
NAMES = {each.value: each.name for each in signal.Signals}  # real-time signals have none
MAX_PROCESSES = 16  # programs at a time, unless environment.options says otherwise
POLL = 0.02  # seconds between two looks at a program
MOST_WRITTEN = 64 * 2**20  # bytes on stdout or stderr
READ = 64 * 1024  # bytes of the end of what it wrote
KILL_SECONDS = 10.0  # for a killed program to end; then the run continues without it
log = logging.getLogger(__name__)


class ProgramFailed(Exception):
    """Says what a program did wrong."""


@checked_dataclass(config=STRICT, frozen=True)
class ProgramOptions:
    """Options of a command: its folder, the names of variables that it may see, and how many run at a time."""

    cwd: str = "."
    env: list[Text] = Field(default_factory=list)
    processes: Count = MAX_PROCESSES


class AgentProgram:
    """Makes the environments, one for each episode. Its endpoint is open for a run."""

    def __init__(self, command: str, options: Mapping[str, Any]) -> None:
        self.options: ProgramOptions = make_from(ProgramOptions, options, "environment.command")
        try:
            self.argv, self.cwd = shlex.split(command), Path(self.options.cwd).expanduser().resolve()
        except ValueError as error:
            raise ValueError(f"environment.command={command}: {error}") from error
        name = self.argv[0] if self.argv else ""
        if shutil.which(str(self.cwd / name) if "/" in name else name) is None:
            text = f"environment.command names the program {name!r}, "
            raise ValueError(f"{text}which is neither on the PATH nor at {self.cwd / name}")
        if missing := [name for name in self.options.env if name not in os.environ]:
            raise ValueError(f"environment.options.env names {', '.join(missing)}: set it, or leave it out")
        self.endpoint = Endpoint()

    def __call__(self, task: Task) -> ProgramEpisode:
        return ProgramEpisode(task, self)

    def tasks(self, split: str, seed: int, count: int) -> Iterable[Task]:
        key = "heldout" if split == "heldout" else "tasks"
        raise ValueError(f"environment.command makes no tasks: give a file of them, data.{key}=FILE.jsonl")


class Scored(ToolEnvironment):
    """An episode at an endpoint, under a key, that says itself what it was worth; `why` it has not."""

    given: Given | None = None
    why = "no reward was posted"

    def __init__(self, task: Task, endpoint: Endpoint, key: str) -> None:
        super().__init__(task)
        self.endpoint, self.key = endpoint, key

    def reward(self, episode: Episode) -> Reward:
        if self.given is None or self.given.reward is None:
            raise Unscored(self.why)
        return Reward(self.given.reward, parts=self.given.parts)


class ProgramEpisode(Scored):
    """One episode of a program."""

    why = 'the program printed no line of JSON with "reward", and posted none'

    def __init__(self, task: Task, program: AgentProgram) -> None:
        super().__init__(task, program.endpoint, new_key())
        self._program = program

    async def play(self, calls: Calls) -> None:
        """Run the program to its end; raise ProgramFailed where it fails. However this ends, nothing goes on."""
        shown = {name: os.environ.get(name) for name in (*INHERITED, *self._program.options.env)}
        with contextlib.ExitStack() as held:
            # Files, not pipes: who has been started by it may hold a pipe for ever. Nobody finds them by a name.
            out, err = (held.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            life, ours = os.pipe()
            for end in (life, ours):
                held.callback(os.close, end)
            folder = tempfile.TemporaryDirectory(prefix="tfactory-episode-", ignore_cleanup_errors=True)
            file = Path(held.enter_context(folder), "task.json")
            row = trajectory_to_dict(Trajectory(self.task, group=""))["task"]
            file.write_text(json.dumps(row, default=str), encoding="utf-8")
            base_url = self.endpoint.base_url
            own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": self.key}
            own |= {"TFACTORY_TASK": str(file), "NO_PROXY": "127.0.0.1,localhost"}
            env = {name: value for name, value in shown.items() if value is not None} | own
            try:
                status = await self._run(env, life, held.enter_context(file.open("rb")), out, err)
            except OSError as error:
                raise ProgramFailed(f"the program cannot be started: {error.strerror}") from error
            self._read(_end_of(out), calls)
            if status:
                how = f"status {status}" if status > 0 else NAMES.get(-status, f"signal {-status}")
                secrets = [self.key, *(env[name] for name in self._program.options.env if len(env[name]) > 3)]
                lines = without(_end_of(err), secrets).split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "nothing on stderr")
                raise ProgramFailed(f"the program ended with {how}: {clean(last.strip())[-MAX_ERROR_CHARS:]}")

    async def _run(self, env: dict[str, str], life: int, stdin: Any, *outputs: Any) -> int:
        """Return its status. Its group ends with us: by `_kill`, or by the kernel when our end of `life` closes."""
        from TrainingFactory.common.workers.child import kill_at_hangup  # not on Windows

        its: dict[str, Any] = {"cwd": self._program.cwd, "env": env, "pass_fds": [life]}
        args = (self._program.argv, -1, None, stdin, *outputs)
        process = subprocess.Popen(*args, **its, start_new_session=True)  # a group of its own
        try:
            kill_at_hangup(life, process.pid)
            while process.poll() is None:
                await asyncio.sleep(POLL)
                if any(os.fstat(each.fileno()).st_size > MOST_WRITTEN for each in outputs):
                    raise ProgramFailed(f"the program wrote more than {MOST_WRITTEN} bytes")
            return process.returncode
        finally:
            try:
                async with asyncio.timeout(KILL_SECONDS):
                    await in_thread(_kill, process, env["TFACTORY_TASK"])
            except TimeoutError:
                log.warning("process %d of environment.command cannot be killed", process.pid)

    def _read(self, printed: str, calls: Calls) -> None:
        """Take the reward of the last line that has one, else the one that was posted."""
        self.given = calls.given
        for line in reversed([line for line in printed.split("\n") if '"reward"' in line]):
            try:
                self.given = Given.model_validate_json(line)
                return
            except ValidationError as error:
                wrong = error.errors(include_url=False)[0]
                if wrong["type"] not in ("json_invalid", "model_type", "missing"):  # about something else
                    self.given, self.why = None, f"the program's reward is of no use: {wrong['msg']}"
                    return


def _kill(process: subprocess.Popen[bytes], task_file: str) -> None:
    """Kill the program's process group, and where there is /proc the processes that left the group, which still have
    its TFACTORY_TASK."""
    gone = contextlib.suppress(OSError)  # it has ended, or is not ours
    with gone:
        os.killpg(process.pid, signal.SIGKILL)
    for environ in glob.glob("/proc/[0-9]*/environ"):
        with gone:
            if f"TFACTORY_TASK={task_file}".encode() in Path(environ).read_bytes().split(b"\0"):
                os.kill(int(environ.split("/")[2]), signal.SIGKILL)
    process.wait()


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - READ))
    return file.read(READ).decode(errors="replace")


class ProgramRun(EpisodeRun):
    """An episode whose turns are the calls that a program makes."""

    def __init__(self, rules: EpisodeRules, trajectory: Trajectory, sampler: Sampler, *given: Any) -> None:
        super().__init__(rules, trajectory, sampler.session(), sampler.max_length, *given)
        self._sampler = sampler

    async def _turns(self, environment: Any) -> None:
        endpoint, trajectory, problem = environment.endpoint, self.trajectory, None
        calls = Calls(self.rules, self._sampler, self.session, self.seed_of, endpoint.counts)
        with endpoint.admitted(environment.key, calls):
            playing = asyncio.ensure_future(environment.play(calls))
            try:
                await asyncio.wait({playing, calls.failed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
                order = await calls.close()
                trajectory.turns = [each.turn for each in order]
                for first in order[:1]:
                    trajectory.prompt, trajectory.tools = first.messages[:-1], first.tools
        if not calls.failed.cancelled():
            calls.failed.result()  # raises: the sampler's failure is the run's
        try:
            playing.result()
        except ProgramFailed as error:
            problem = str(error)
        if not order:
            self._end("error", problem or "the program ended without an answered call to OPENAI_BASE_URL")
        elif calls.limited:
            self._end("max_turns", None)
        elif calls.full or order[-1].turn.completion.finish == "length":
            self._end("truncated", None)
        else:
            self._end("done" if problem is None else "error", problem)

    def _check(self) -> None:
        """Leave it to `Conversations`: a prompt goes on from what was sampled, or begins a row."""


class ProgramRollouts(RolloutEngine):
    """Plays episodes of an `AgentProgram`."""

    def _new(self, trajectory: Trajectory, sampler: Sampler, *given: Any) -> EpisodeRun:
        return ProgramRun(self.rules, trajectory, sampler, *given)
