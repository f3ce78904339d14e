"""A user's own agent program as an environment. Each episode starts the program with an endpoint address and a key; the
program uses its own tools. The program or a verifier command reports the episode's reward."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import glob
import json
import logging
import os
import re
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

from TrainingFactory.agent_api.agent_endpoint import AgentEndpoint, EpisodeRequests, ReportedReward, make_key
from TrainingFactory.common.images import as_text
from TrainingFactory.common.options import STRICT, Count, Text, make_from
from TrainingFactory.common.texts import MAX_ERROR_CHARS, escape_control, redact
from TrainingFactory.common.workers.groups import inherit_variables
from TrainingFactory.data.trajectories import trajectory_to_dict
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Episode, Sampler
from TrainingFactory.rewards.adapt import Unscored
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Task, Trajectory

SIGNAL_NAMES = {member.value: member.name for member in signal.Signals}  # real-time signals have no names
MAX_PROCESSES = 16  # default of environment.options.processes
# In a command and in the values of options.variables: prompt of the task, working folder, a folder for the program's
# state, endpoint with and without /v1, key and model name.
COMMAND_PLACEHOLDERS = ("{prompt}", "{work}", "{home}", "{base_url}", "{root_url}", "{key}", "{model}")
POLL_SECONDS = 0.02  # seconds between two checks of a running program
MAX_OUTPUT_BYTES = 64 * 2**20  # maximum bytes on stdout or stderr
OUTPUT_TAIL_BYTES = 64 * 1024  # bytes read from the end of an output file
KILL_SECONDS = 10.0  # for a killed program to end; then the run continues without it
log = logging.getLogger(__name__)


class ProgramFailed(Exception):
    """An error of the user's program, which ends its episode and not the run."""


@checked_dataclass(config=STRICT, frozen=True)
class ProgramOptions:
    """The options of an agent program: `environment.options` if `environment.command` is set."""

    cwd: str = "."  # working folder of the program
    env: list[Text] = Field(default_factory=list)  # environment variables to pass on
    # Further environment variables, with `COMMAND_PLACEHOLDERS`.
    variables: dict[str, str] = Field(default_factory=dict)
    processes: Count = MAX_PROCESSES  # maximum concurrent programs
    workspace: str | None = None  # folder that is copied for each episode; the program works in the copy
    verify: str | None = None  # command that scores the episode, run in the program's working folder
    # Requests with another model name are answered and not trained; None: all are trained.
    model: Text | None = None
    # Columns of the task that a program gets besides `id` and `prompt` if it does not score its episode.
    columns: list[Text] = Field(default_factory=list)


class AgentProgram:
    """Environment factory: each episode runs the command once. All episodes share one endpoint."""

    def __init__(self, command: str, options: Mapping[str, Any]) -> None:
        self.options: ProgramOptions = make_from(ProgramOptions, options, "environment.command")
        self.cwd = Path(self.options.cwd).expanduser().resolve()
        self.argv = self._parse_argv("environment.command", command)
        verify = self.options.verify
        self.verify_argv = None if verify is None else self._parse_argv("environment.options.verify", verify)
        if unset := [name for name in self.options.env if name not in os.environ]:
            raise ValueError(f"environment.options.env: {', '.join(unset)} is not set. Set or remove it")
        self.workspace = self.options.workspace and Path(self.options.workspace).expanduser().resolve()
        if self.workspace and not self.workspace.is_dir():
            raise ValueError(f"environment.options.workspace: there is no folder {self.workspace}")
        self.endpoint = AgentEndpoint(self.options.model)
        self.scores_episodes = verify is None  # the program reports the reward, for which it needs the answer

    def without_scoring(self) -> AgentProgram:
        """Return a copy with the same endpoint whose episodes the config's reward scores, not the program."""
        program = copy.copy(self)
        program.scores_episodes = False
        return program

    def select_columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a task that the program receives. A program that does not score its own episode gets
        only `id`, `prompt` and the columns named in its options, because the model could read the answer with the
        program's tools."""
        if self.scores_episodes:
            return row
        columns = self.options.columns
        visible_row = {name: row[name] for name in row if name in ("id", "prompt") or name in columns}
        metadata = {name: value for name, value in row["metadata"].items() if name in columns}
        return visible_row | ({"metadata": metadata} if metadata else {})

    def _parse_argv(self, key: str, command: str) -> list[str]:
        """Split a command and check that its program exists."""
        try:
            argv = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"{key}={command}: {error}") from error
        executable = argv[0] if argv else ""
        if shutil.which(str(self.cwd / executable) if "/" in executable else executable) is None:
            text = f"cannot find the program {executable!r} of {key}"
            raise ValueError(f"{text}: it is neither on the PATH nor at {self.cwd / executable}")
        if argv and "/" in executable:
            argv[0] = str(self.cwd / executable)  # also from the folder of an episode
        return argv

    def __call__(self, task: Task) -> ProgramEpisode:
        return ProgramEpisode(task, self)

    def tasks(self, split: str, seed: int, count: int) -> Iterable[Task]:
        key = "heldout" if split == "heldout" else "tasks"
        raise ValueError(f"environment.command generates no tasks. Set data.{key}=FILE.jsonl")


class SelfScoredEpisode(ToolEnvironment):
    """An episode whose client reports the reward itself, to `endpoint` under the API key `key`."""

    reported_reward: ReportedReward | None = None
    missing_reason = "no reward was posted"  # error if `reported_reward` is None

    def __init__(self, task: Task, endpoint: AgentEndpoint, key: str) -> None:
        super().__init__(task)
        self.endpoint, self.key = endpoint, key

    async def run_client(self, requests: EpisodeRequests) -> None:
        """Run or await the client until its episode ends, and set `reported_reward`."""
        raise NotImplementedError

    def reward(self, episode: Episode) -> Reward:
        if self.reported_reward is None or self.reported_reward.reward is None:
            raise Unscored(self.missing_reason)
        return Reward(self.reported_reward.reward, parts=self.reported_reward.parts)


class ProgramEpisode(SelfScoredEpisode):
    """An episode played by one process of the user's program."""

    missing_reason = 'the program neither printed a line of JSON with "reward" nor posted a reward'

    def __init__(self, task: Task, program: AgentProgram) -> None:
        super().__init__(task, program.endpoint, make_key())
        self._program = program

    async def run_client(self, requests: EpisodeRequests) -> None:
        """Run the program until it exits, then the verifier; raise ProgramFailed if the program fails. All their
        processes are killed at the end, also after an error."""
        program = self._program
        with contextlib.ExitStack() as stack:
            task_folder = tempfile.TemporaryDirectory(prefix="tfactory-episode-", ignore_cleanup_errors=True)
            task_file = Path(stack.enter_context(task_folder), "task.json")
            task_row = trajectory_to_dict(Trajectory(self.task, group=""))["task"]
            task_json = json.dumps(program.select_columns(task_row), default=str).encode()
            task_file.write_bytes(task_json)
            home_folder = tempfile.TemporaryDirectory(prefix="tfactory-home-", ignore_cleanup_errors=True)
            cwd = program.cwd
            if program.workspace:
                cwd = task_file.parent / "work"
                await in_thread(shutil.copytree, program.workspace, cwd, True)  # symbolic links stay links
            placeholders = self._make_placeholders(cwd, stack.enter_context(home_folder))
            env = self._make_env(placeholders)
            env |= {"TFACTORY_TASK": str(task_file), "NO_PROXY": "127.0.0.1,localhost"}
            process = ProgramProcess(_fill_templates(program.argv, placeholders), cwd, env, task_json)
            status, stdout, stderr = await process.run("the program")
            self._set_reward(stdout, requests)
            if program.verify_argv is not None and (
                status == 0 or requests.turns_exceeded or requests.is_context_full
            ):
                task_file = task_file.with_name("verified_task.json")
                task_json = json.dumps(task_row, default=str).encode()
                task_file.write_bytes(task_json)
                env = env | {"TFACTORY_TASK": str(task_file)}
                argv = _fill_templates(program.verify_argv, placeholders)
                await self._run_verifier(ProgramProcess(argv, cwd, env, task_json))
        if status:
            secrets = [self.key, *(env[name] for name in program.options.env if len(env[name]) > 3)]
            lines = redact(stderr, secrets).split("\n")
            last_line = next((line.strip() for line in reversed(lines) if line.strip()), "nothing on stderr")
            text = f"the program ended with {_describe_exit(status)}: {escape_control(last_line)[-MAX_ERROR_CHARS:]}"
            raise ProgramFailed(text)

    def _make_placeholders(self, cwd: Path, home: str) -> dict[str, str]:
        """Return the values that replace the `COMMAND_PLACEHOLDERS` in the command and the variables."""
        prompt = self.task.prompt
        prompt_text = (
            prompt if isinstance(prompt, str) else "\n\n".join(as_text(m.content, m.images) for m in prompt)
        )
        root_url = self.endpoint.base_url.removesuffix("/v1")
        endpoint_texts = (self.endpoint.base_url, root_url, self.key, self.endpoint.model or "policy")
        return dict(zip(COMMAND_PLACEHOLDERS, (prompt_text, str(cwd), home, *endpoint_texts), strict=True))

    def _make_env(self, placeholders: dict[str, str]) -> dict[str, str]:
        """Return the program's environment: inherited variables, addresses and keys of all dialects, options."""
        env = inherit_variables(self._program.options.env)
        env |= dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), placeholders["{base_url}"])
        env |= dict.fromkeys(("ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"), placeholders["{root_url}"])
        env |= dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), self.key)
        variables = self._program.options.variables
        return env | dict(zip(variables, _fill_templates(variables.values(), placeholders), strict=True))

    async def _run_verifier(self, process: ProgramProcess) -> None:
        """Set the reward that the verifier prints, else 1 if it exits with status 0, and 0 for another status."""
        exit_status, stdout, _ = await process.run("the verifier")
        self.reported_reward = None
        if self._read_reward(stdout):
            return
        if exit_status < 0:
            self.missing_reason = f"the verifier ended with {_describe_exit(exit_status)}"
        else:
            self.reported_reward = ReportedReward(reward=float(exit_status == 0))

    def _set_reward(self, stdout: str, requests: EpisodeRequests) -> None:
        """Set the reward from the last stdout line with a reward, else the posted reward."""
        if not self._read_reward(stdout):
            self.reported_reward = requests.reported_reward

    def _read_reward(self, stdout: str) -> bool:
        """Set the reward from the last stdout line with a reward; return whether there is such a line."""
        for line in reversed([line for line in stdout.split("\n") if '"reward"' in line]):
            try:
                self.reported_reward = ReportedReward.model_validate_json(line)
                return True
            except ValidationError as error:
                problem = error.errors(include_url=False)[0]
                if problem["type"] not in ("json_invalid", "model_type", "missing"):  # unrelated output
                    self.reported_reward = None
                    self.missing_reason = f"the program's reward is invalid: {problem['msg']}"
                    return True
        return False


class ProgramProcess:
    """A process of an episode: the program, or the verifier. Both read the task from stdin."""

    def __init__(self, argv: list[str], cwd: Path, env: dict[str, str], task_json: bytes) -> None:
        self._argv, self._cwd, self._env, self._task_json = argv, cwd, env, task_json

    async def run(self, program_name: str) -> tuple[int, str, str]:
        """Run the process; return its exit status and the ends of its stdout and stderr."""
        with contextlib.ExitStack() as stack:
            # Unnamed files, not pipes, because a child of the program can keep a pipe open forever.
            stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            stdin: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            stdin.write(self._task_json)
            stdin.seek(0)
            read_end, write_end = os.pipe()
            for fd in (read_end, write_end):
                stack.callback(os.close, fd)
            try:
                exit_status = await self._run(read_end, stdin, stdout, stderr)
            except OSError as error:
                raise ProgramFailed(f"{program_name} cannot be started: {error.strerror}") from error
            return exit_status, _read_tail(stdout), _read_tail(stderr)

    async def _run(self, read_end: int, stdin: Any, *output_files: Any) -> int:
        """Run the process and return its exit status. Kill its process group at the end. The group is also killed if
        this process dies, because that closes the pipe `read_end`."""
        from TrainingFactory.common.workers.child import kill_at_hangup  # not available on Windows

        options: dict[str, Any] = {"cwd": self._cwd, "env": self._env, "pass_fds": [read_end]}
        popen_args = (self._argv, -1, None, stdin, *output_files)
        process = subprocess.Popen(*popen_args, **options, start_new_session=True)  # in its own process group
        try:
            kill_at_hangup(read_end, process.pid)
            while process.poll() is None:
                await asyncio.sleep(POLL_SECONDS)
                if any(os.fstat(file.fileno()).st_size > MAX_OUTPUT_BYTES for file in output_files):
                    raise ProgramFailed(f"the program wrote more than {MAX_OUTPUT_BYTES} bytes")
            return process.returncode
        finally:
            try:
                async with asyncio.timeout(KILL_SECONDS):
                    await in_thread(_kill_processes, process, self._env["TFACTORY_TASK"])
            except TimeoutError:
                log.warning("process %d of environment.command cannot be killed", process.pid)


def _fill_templates(templates: Iterable[str], placeholders: Mapping[str, str]) -> list[str]:
    """Replace the placeholders in texts, each once, so that a value with a placeholder's name stays as it is."""
    pattern = "|".join(map(re.escape, placeholders))
    return [re.sub(pattern, lambda match: placeholders[match[0]], template) for template in templates]


def _describe_exit(status: int) -> str:
    return f"status {status}" if status > 0 else SIGNAL_NAMES.get(-status, f"signal {-status}")


def _kill_processes(process: subprocess.Popen[bytes], task_file: str) -> None:
    """Kill the program's process group. On systems with /proc, also kill processes that left the group, found by their
    TFACTORY_TASK."""
    ignore_errors = contextlib.suppress(OSError)  # the process has ended, or belongs to another user
    with ignore_errors:
        os.killpg(process.pid, signal.SIGKILL)
    for environ_path in glob.glob("/proc/[0-9]*/environ"):
        with ignore_errors:
            if f"TFACTORY_TASK={task_file}".encode() in Path(environ_path).read_bytes().split(b"\0"):
                os.kill(int(environ_path.split("/")[2]), signal.SIGKILL)
    process.wait()


def _read_tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_TAIL_BYTES))
    return file.read(OUTPUT_TAIL_BYTES).decode(errors="replace")


class ProgramRun(EpisodeRun):
    """An episode whose turns are the answers to an agent program's requests."""

    def __init__(self, rules: EpisodeSettings, trajectory: Trajectory, sampler: Sampler, *args: Any) -> None:
        super().__init__(rules, trajectory, sampler.session(), sampler.max_length, *args)
        self._sampler = sampler

    async def _play_turns(self, environment: Any) -> None:
        assert isinstance(environment, SelfScoredEpisode)
        endpoint, trajectory, error_text = environment.endpoint, self.trajectory, None
        requests = EpisodeRequests(
            self.rules, self._sampler, self.session, self.seed_of, endpoint.event_counts, endpoint.model
        )
        with endpoint.accept_requests(environment.key, requests):
            program_task = asyncio.ensure_future(environment.run_client(requests))
            try:
                await asyncio.wait({program_task, requests.failure}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                program_task.cancel()
                await asyncio.gather(program_task, return_exceptions=True)
                nodes = await requests.close()
                trajectory.turns = [node.turn for node in nodes]
                if nodes:
                    trajectory.prompt, trajectory.tools = nodes[0].messages[:-1], nodes[0].tools
        if not requests.failure.cancelled():
            requests.failure.result()  # raises the sampler's error, which stops the run
        try:
            program_task.result()
        except ProgramFailed as error:
            error_text = str(error)
        if not nodes:
            self._end_episode("error", error_text or "the program made no successful request to the endpoint")
        elif requests.turns_exceeded:
            self._end_episode("max_turns", None)
        elif requests.is_context_full or nodes[-1].turn.completion.finish == "length":
            self._end_episode("truncated", None)
        else:
            self._end_episode("done" if error_text is None else "error", error_text)

    def _check_prompt_chain(self) -> None:
        """Check nothing, because `Conversations` makes each prompt extend the sampled tokens or start a new row."""


class ProgramRollouts(RolloutEngine):
    """Rollout engine for episodes of an `AgentProgram`."""

    def _make_run(self, trajectory: Trajectory, sampler: Sampler, *args: Any) -> EpisodeRun:
        return ProgramRun(self.rules, trajectory, sampler, *args)
