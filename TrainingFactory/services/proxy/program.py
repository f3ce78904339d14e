"""A user's own agent as an environment: for each episode its program is started with an address and a key, plays with
its own tools, and says at its end what the episode was worth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.data.trajectories import trajectory_to_dict
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.options import STRICT, Count, Text, make_from
from TrainingFactory.protocols import Episode, Sampler
from TrainingFactory.rewards.adapt import Unscored
from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.rollout.episode import EpisodeRules, EpisodeRun
from TrainingFactory.services.proxy.calls import Calls, Given
from TrainingFactory.services.proxy.endpoint import Endpoint
from TrainingFactory.texts import MAX_ERROR_CHARS, clean, without
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.types import Reward, Task, Trajectory
from TrainingFactory.workers.ending import descendants, kill_all, signal_group

# What a program gets of our environment besides what `env` names: enough to start, and nothing secret.
INHERITED = "HOME LANG LC_ALL LD_LIBRARY_PATH LOGNAME PATH SHELL TERM TMPDIR TZ USER".split()
POLL = 0.02  # seconds between two looks at a program
MOST_WRITTEN = 64 * 2**20  # bytes on stdout or stderr
READ = 64 * 1024  # bytes of the end of what it wrote


class ProgramFailed(Exception):
    """Says what a program did wrong."""


@checked_dataclass(config=STRICT, frozen=True)
class ProgramOptions:
    """Options beside the command: the folder to start it in, the names of variables that it may see, and how many run
    at a time."""

    cwd: str | None = None
    env: list[Text] = Field(default_factory=list)
    processes: Count = 16


class AgentProgram:
    """Makes the environments, one for each episode. `open` and `close` belong to the run's event loop."""

    def __init__(self, command: str, options: Mapping[str, Any]) -> None:
        self.options: ProgramOptions = make_from(ProgramOptions, options, "environment.command")
        try:
            self.argv = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"environment.command cannot be read: {error}") from error
        self.cwd = Path(self.options.cwd or ".").expanduser().resolve()
        if not self.cwd.is_dir():
            raise ValueError(f"environment.options.cwd is {self.options.cwd!r}, and there is no such folder")
        where = str(self.cwd / self.argv[0]) if self.argv and "/" in self.argv[0] else None
        if not self.argv or shutil.which(where or self.argv[0]) is None:
            raise ValueError(
                f"environment.command names the program {(self.argv or [''])[0]!r}, which is not found; name one "
                "that is on the PATH, or give its whole path"
            )
        if missing := [name for name in self.options.env if name not in os.environ]:
            raise ValueError(
                f"environment.options.env names {', '.join(missing)}, and there are no such variables; set them, or "
                "leave them out (entries are names alone; values stay out of files)"
            )
        self.secrets = [os.environ[name] for name in self.options.env if len(os.environ[name]) > 3]
        self.endpoint = Endpoint()
        self.open, self.close, self.metrics = self.endpoint.open, self.endpoint.close, self.endpoint.metrics

    def __call__(self, task: Task) -> ProgramEpisode:
        return ProgramEpisode(task, self)

    def tasks(self, split: str, seed: int, count: int) -> Iterable[Task]:
        key = "tasks" if split == "train" else "heldout"
        raise ValueError(f"an environment.command makes no tasks: give a file of them, data.{key}=FILE.jsonl")

    def environment(self, folder: Path, base_url: str, key: str) -> dict[str, str]:
        """Return the variables of a program."""
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": key}
        own |= {"TFACTORY_TASK": str(folder / "task.json"), "NO_PROXY": "127.0.0.1,localhost"}
        return {
            name: os.environ[name] for name in (*INHERITED, *self.options.env) if name in os.environ
        } | own


class Scored(ToolEnvironment):
    """An episode that says itself what it was worth; `why` it has not."""

    given: Given | None = None
    why = "no reward was posted"

    def reward(self, episode: Episode) -> Reward:
        reward = None if self.given is None else self.given.as_reward()
        if reward is None:
            raise Unscored(self.why)
        return reward


class ProgramEpisode(Scored):
    """One episode of a program."""

    why = 'the program printed no line of JSON with "reward", and posted none'

    def __init__(self, task: Task, program: AgentProgram) -> None:
        super().__init__(task)
        self._program = program

    async def play(self, calls: Calls, base_url: str, key: str) -> None:
        """Run the program to its end; raise ProgramFailed where it fails. However this ends, nothing goes on."""
        with tempfile.TemporaryDirectory(prefix="tfactory-episode-") as name:
            folder = Path(name)
            row = trajectory_to_dict(Trajectory(self.task, group=""))["task"]
            (folder / "task.json").write_text(json.dumps(row, default=str), encoding="utf-8")
            try:
                status = await self._run(folder, self._program.environment(folder, base_url, key))
                self._read(_tail(folder / "stdout"), calls)
            except OSError as error:
                raise ProgramFailed(f"the program cannot be started: {error.strerror}") from error
            if status:
                how = (
                    f"ended with status {status}" if status > 0 else f"died of {signal.Signals(-status).name}"
                )
                lines = without(_tail(folder / "stderr"), [key, *self._program.secrets]).split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "nothing on stderr")
                raise ProgramFailed(f"the program {how}: {clean(last.strip())[-MAX_ERROR_CHARS:]}")

    async def _run(self, folder: Path, environment: dict[str, str]) -> int:
        """Return its status. Files, not pipes: who has been started by it may hold a pipe for ever."""
        with contextlib.ExitStack() as files:
            stdin = files.enter_context((folder / "task.json").open("rb"))
            outputs = [folder / "stdout", folder / "stderr"]
            out, err = (files.enter_context(path.open("wb")) for path in outputs)
            process = subprocess.Popen(
                self._program.argv, stdin=stdin, stdout=out, stderr=err, cwd=self._program.cwd, env=environment,
                start_new_session=True,
            )  # fmt: skip
        try:
            while process.poll() is None:
                await asyncio.sleep(POLL)
                if any(path.stat().st_size > MOST_WRITTEN for path in outputs):
                    raise ProgramFailed(f"the program wrote more than {MOST_WRITTEN} bytes")
            return process.returncode
        finally:
            started = descendants(process.pid) if process.returncode is None else []
            signal_group(process.pid, signal.SIGKILL)
            kill_all(started)
            process.wait()

    def _read(self, printed: str, calls: Calls) -> None:
        """Take the reward of the last line that has one, else the one that was posted."""
        self.given = calls.given
        for line in reversed(printed.split("\n")):
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and "reward" in row:
                    try:
                        self.given = Given(**{key: row[key] for key in ("reward", "parts") if key in row})
                    except ValidationError as error:
                        wrong = error.errors(include_url=False)[0]
                        self.given, self.why = None, f"the program's reward is of no use: {wrong['msg']}"
                    return


class ProgramRun(EpisodeRun):
    """An episode whose turns are the calls that a program makes."""

    def __init__(
        self, endpoint: Endpoint, rules: EpisodeRules, trajectory: Trajectory, sampler: Sampler,
        seed_of: Callable[[int], int], key: EpisodeKey, secret: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rules, trajectory, sampler.session(), sampler.max_length, seed_of, key)
        self._endpoint, self._sampler, self._secret = endpoint, sampler, secret

    async def _turns(self, environment: Any) -> None:
        rules, problem = self.rules, None
        calls = Calls(
            rules.chat, self._sampler, self.session, rules.params, self.seed_of, rules.max_turns,
            self._endpoint.counts,
        )  # fmt: skip
        with self._endpoint.admitted(calls, self._secret) as key:
            playing = asyncio.ensure_future(environment.play(calls, self._endpoint.base_url, key))
            try:
                await asyncio.wait({playing, calls.failed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
                self._keep(calls, await calls.close())
        if calls.failed.done() and not calls.failed.cancelled():
            calls.failed.result()  # raises: the sampler's failure is the run's
        try:
            playing.result()
        except ProgramFailed as error:
            problem = str(error)
        turns = self.trajectory.turns
        if not turns:
            nothing = "the program made no call that was answered (it is to call OPENAI_BASE_URL)"
            self._end("error", problem or nothing)
        elif calls.limited:
            self._end("max_turns", None)
        elif calls.full or turns[-1].completion.finish == "length":
            self._end("truncated", None)
        else:
            self._end("done" if problem is None else "error", problem)

    def _keep(self, calls: Calls, turns: list[Any]) -> None:
        self.trajectory.turns = turns
        if turns:
            first = next(each for each in calls.conversations.answered if each.turn is turns[0]).begun
            self.trajectory.prompt, self.trajectory.tools = first.messages, first.tools

    def _check(self) -> None:
        """Leave it to `Conversations`: a prompt goes on from what was sampled, or begins a row."""


class ProgramRollouts(AsyncRolloutEngine):
    """Plays episodes of an `AgentProgram`."""

    def _new(
        self, trajectory: Trajectory, sampler: Sampler, seed_of: Callable[[int], int], key: EpisodeKey
    ) -> EpisodeRun:
        program: Any = self.rules.environment
        return ProgramRun(program.endpoint, self.rules, trajectory, sampler, seed_of, key)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - READ))
        return file.read().decode(errors="replace")
