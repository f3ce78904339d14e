"""A reward in a process of its own: what holds the interpreter, or may bring it down, then does so to itself only.

Run as a module it is that process. Lines of JSON go in and out: first which reward it is, then the trajectories of one
call at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from TrainingFactory.data.trajectories import trajectory_from_dict, trajectory_to_dict
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.adapt import Adapted, BrokeOff, Unscored, alone
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.targets import load_target, whole_path
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Task, ToolFailure, ToolResult, Trajectory
from TrainingFactory.user_code import failure

CLOSING_SECONDS = 2.0
STARTING_SECONDS = 120.0  # a reward may import much
SPARE_SECONDS = 10.0  # after which a process ends itself, if nobody else did
LOOK_SECONDS = 0.1  # between looks whether a process that says nothing is still there
ROOT = Path(__file__).resolve().parents[3]  # where the package lies
# What a reward raises at a row that it does not understand; anything else may be the worker's.
ROWS_OWN = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, ToolFailure)


class WorkerFailure(Exception):
    """A process could not score anything: it cannot be started, or what its reward needs is out of reach."""


@dataclass(slots=True)
class FinishedEpisode:
    """A trajectory as a reward wants it, long after its environment was closed."""

    trajectory: Trajectory

    @property
    def task(self) -> Task:
        return self.trajectory.task

    @property
    def environment(self) -> Environment:
        raise ToolFailure("the environment of this episode is closed; a reward that needs it cannot run here")

    async def call(self, tool: str, **arguments: Any) -> ToolResult:
        raise ToolFailure(f"the environment of this episode is closed, so {tool} cannot be called")


class RewardProcess:
    """The reward at `target` (`rewards.py:score`, `package.module:function`), or what the function there makes of
    `options`, in a process that starts with the first call. One call at a time; one that takes longer than `timeout`
    seconds ends the process and leaves its episodes unscored, one that brings the process down raises ConnectionError.
    The next call starts another."""

    def __init__(
        self,
        target: str,
        timeout: float = 300.0,
        options: Mapping[str, Any] | None = None,
        like: Adapted | None = None,  # the same reward in this process, where it has been loaded already
    ) -> None:
        self.like = like or load_target(target, options)
        self.target, self.timeout = whole_path(target), timeout
        self._options = options
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._call: threading.Event | None = None  # the one that the process is at
        self._talk = threading.Thread()  # the last exchange
        self._closed = False

    @property
    def grouped(self) -> bool:
        return self.like.grouped

    @property
    def compares(self) -> bool:
        return self.like.compares

    async def __call__(self, episode: Episode) -> Reward:
        return await alone(self, episode)

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        for episode in episodes:
            _check_json(episode.task)
        line = json.dumps([trajectory_to_dict(each.trajectory) for each in episodes])
        call = threading.Event()  # set: nobody waits for it any more
        try:
            answer = await in_thread(self._exchange, line, call)
        except asyncio.CancelledError:
            call.set()
            if (process := self._process) is not None and self._call is call:
                _kill(process)
            raise
        if "error" in answer:
            raise _failure(answer)
        return [_failure(each) if "error" in each else Reward(**each) for each in answer["rewards"]]

    def _exchange(self, line: str, call: threading.Event) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise ConnectionError(f"the process of {self.target} was closed")
            process = self._running()
            self._call = call
            if call.is_set() or self._closed:  # given up while it was starting
                self._call = None
                raise ConnectionError(f"the call of {self.target} was given up")
            try:
                said = self._asked(process, line, self.timeout)
            finally:
                self._call = None
            if said is not None:
                return said
            self._end()
        raise ConnectionError(f"the process of {self.target} is gone")

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            own = os.environ.get("PYTHONPATH")
            self._process = subprocess.Popen(
                # -P: what lies in the working folder must not replace a module that we import.
                [sys.executable, "-P", "-m", "TrainingFactory.rewards.workers.processes"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *([own] if own else [])])},
                start_new_session=True,  # so that it can be ended with all that the reward has started
            )
            first = {"target": self.target, "options": self._options, "timeout": self.timeout}
            path = [each or os.getcwd() for each in sys.path]
            why: Any = "it ended at once"
            try:
                started = self._asked(self._process, json.dumps(first | {"path": path}), STARTING_SECONDS)
                why = None if started == {} else started["error"] if started else why
            except Unscored as error:
                why = error
            if why is not None:
                self._end()
                raise WorkerFailure(f"a process for {self.target} could not be started: {why}")
        return self._process

    def _asked(self, process: subprocess.Popen[str], line: str, seconds: float) -> dict[str, Any] | None:
        """What the process says to a line; None if it has died of it, or is to be closed. Something else talks to it:
        a process that the reward has started may hold the pipe when this one is gone, and then nothing ends there."""
        answers: SimpleQueue[str] = SimpleQueue()
        self._talk = threading.Thread(target=_talk, args=(process, line, answers), daemon=True)
        self._talk.start()
        until, said, gone = time.monotonic() + seconds, None, False
        while said is None and not gone:
            gone = process.poll() is not None or self._closed  # before the look: its last words count
            with suppress(Empty):
                said = answers.get(timeout=LOOK_SECONDS)
            if said is None and not gone and time.monotonic() > until:
                self._end()
                raise Unscored(
                    f"the reward {self.like.name} took longer than {seconds:g} s, and its process was ended"
                )
        return json.loads(said) if said and said.endswith("\n") else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        if not self._talk.is_alive():  # else it is in the middle of a call
            _close(process.stdin)  # it ends with it
            with suppress(subprocess.TimeoutExpired):
                process.wait(CLOSING_SECONDS)
        _kill(process)  # and what the reward has started
        process.wait()
        self._talk.join(CLOSING_SECONDS)
        if not self._talk.is_alive():  # else something that left the group holds the pipes
            _close(process.stdin)
            _close(process.stdout)

    def close(self) -> None:
        """Ends the process, also in the middle of a call; there will be no other."""
        self._closed = True
        if self._lock.locked() and (process := self._process) is not None:
            _kill(process)
        with self._lock:
            self._end()


def _talk(process: subprocess.Popen[str], line: str, answers: SimpleQueue[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    said = ""
    with suppress(OSError, ValueError):  # it is gone
        process.stdin.write(line + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
    answers.put(said)


def _kill(process: subprocess.Popen[str]) -> None:
    """With all processes of its group, also when itself it has ended."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that is gone
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _close(pipe: IO[str]) -> None:
    with suppress(OSError):  # what could not be written is lost
        pipe.close()


def _check_json(task: Task) -> None:
    """A reward must see the same task there as here, or it may pay otherwise."""
    parts = [("answer", {"answer": task.answer})]
    parts += [(f"metadata.{key}", {key: value}) for key, value in task.metadata.items()]
    for name, part in parts:
        try:
            same = _same(part, json.loads(json.dumps(part)))
        except (TypeError, ValueError):  # nothing that JSON has
            same = False
        if not same:
            raise Unscored(
                f"task {task.id}: {name} cannot go to a process as it is: {part!r:.80}; make it what JSON has (a list "
                "for a tuple, a text for a key), or score it in this process (processes: 0)"
            )


def _same(here: Any, there: Any) -> bool:
    if isinstance(here, dict) and isinstance(there, dict):
        return here.keys() == there.keys() and all(_same(here[key], there[key]) for key in here)
    if isinstance(here, list) and isinstance(there, list):
        return len(here) == len(there) and all(map(_same, here, there))
    return here == there or (here != here and there != there)  # NaN


def main() -> None:
    """Answers until its input ends."""
    lines, answers = _own_pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it

    def answer(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    first = json.loads(lines.readline())
    sys.path[:] = first["path"]
    try:
        reward = load_target(first["target"], first["options"])
    except Exception as error:  # a file of a user
        answer({"error": failure(error)})
        return
    answer({})
    with asyncio.Runner() as loop:  # one for all calls: an async reward may keep a connection
        for line in lines:
            _limit(first["timeout"] + SPARE_SECONDS)
            answer(loop.run(_scored(reward, line)))
            _limit(0)


def _own_pipes() -> tuple[IO[str], IO[str]]:
    """The pipes to who started it, out of reach for the reward: what it prints must not get among the answers, and a
    program that it starts must not read the lines."""
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return lines, answers


async def _scored(reward: Adapted, line: str) -> dict[str, Any]:
    try:
        episodes = [FinishedEpisode(trajectory_from_dict(row)) for row in json.loads(line)]
        found = await reward.group(episodes)
    except Exception as error:  # rewards are foreign code
        return _told(error)
    return {"rewards": [_told(each) if isinstance(each, Exception) else asdict(each) for each in found]}


def _told(error: Exception) -> dict[str, Any]:
    """For `_failure` at the other end, which makes the same of it."""
    if isinstance(error, JudgeFailure):
        return {"error": str(error), "judge": error.kind}
    own = isinstance(error, ROWS_OWN) and not isinstance(error, BrokeOff)
    return {"error": failure(error), "own": own}


def _failure(told: dict[str, Any]) -> Exception:
    if "judge" in told:
        return JudgeFailure(told["error"], told["judge"])
    return (Unscored if told["own"] else WorkerFailure)(told["error"])


def _limit(seconds: float) -> None:
    """A signal that nobody handles ends the process, whoever holds the interpreter; 0: none."""
    if hasattr(signal, "SIGALRM"):
        signal.alarm(math.ceil(seconds))


if __name__ == "__main__":
    main()
