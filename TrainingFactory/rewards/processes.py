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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from TrainingFactory.data.trajectories import trajectory_from_dict, trajectory_to_dict
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.adapt import Adapted, Unscored, alone
from TrainingFactory.rewards.targets import load_target, whole_path
from TrainingFactory.tools.python_files import failure
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Reward, Task, ToolFailure, ToolResult, Trajectory

CLOSING_SECONDS = 2.0
STARTING_SECONDS = 120.0  # a reward may import much
SPARE_SECONDS = 10.0  # after which a process ends itself, if nobody else did


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
        self._first = json.dumps({"target": self.target, "options": options, "timeout": timeout})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._call: threading.Event | None = None  # the one that the process is at
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
        line = json.dumps([trajectory_to_dict(each.trajectory) for each in episodes])
        call = threading.Event()  # set: nobody waits for it any more
        try:
            answer = await in_thread(self._exchange, line, call)
        except asyncio.CancelledError:
            call.set()
            if (process := self._process) is not None and self._call is call:
                process.kill()
            raise
        if "error" in answer:
            raise Unscored(answer["error"])
        return [Unscored(each["error"]) if "error" in each else Reward(**each) for each in answer["rewards"]]

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
            self._process = subprocess.Popen(
                [sys.executable, "-m", "TrainingFactory.rewards.processes"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            started = self._asked(self._process, self._first, STARTING_SECONDS)
            if started is None or "error" in started:
                self._end()
                why = "it ended at once" if started is None else started["error"]
                raise Unscored(f"a process for {self.target} could not be started: {why}")
        return self._process

    def _asked(self, process: subprocess.Popen[str], line: str, seconds: float) -> dict[str, Any] | None:
        """What the process says to a line; None if it has died of it."""
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            said = process.stdout.readline()
        except OSError:
            said = ""
        finally:
            timer.cancel()
        if said.endswith("\n"):
            return json.loads(said)
        if late.is_set():
            self._end()
            raise Unscored(
                f"the reward {self.like.name} took longer than {seconds:g} s, and its process was ended"
            )
        return None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):  # it may be gone already
            process.stdin.close()  # it ends with it
        try:
            process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def close(self) -> None:
        """Ends the process, also in the middle of a call; there will be no other."""
        self._closed = True
        if self._lock.locked() and (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()


def main() -> None:
    """Answers until its input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the reward prints must not get among the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who started it

    def answer(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    first = json.loads(sys.stdin.readline())
    try:
        reward = load_target(first["target"], first["options"])
    except Exception as error:  # a file of a user
        answer({"error": failure(error)})
        return
    answer({"grouped": reward.grouped})
    with asyncio.Runner() as loop:  # one for all calls: an async reward may keep a connection
        for line in sys.stdin:
            _limit(first["timeout"] + SPARE_SECONDS)
            answer(loop.run(_scored(reward, line)))
            _limit(0)


async def _scored(reward: Adapted, line: str) -> dict[str, Any]:
    try:
        episodes = [FinishedEpisode(trajectory_from_dict(row)) for row in json.loads(line)]
        found = await reward.group(episodes)
    except Exception as error:  # rewards are foreign code
        return {"error": failure(error)}
    return {
        "rewards": [
            {"error": failure(each)} if isinstance(each, Exception) else asdict(each) for each in found
        ]
    }


def _limit(seconds: float) -> None:
    """A signal that nobody handles ends the process, whoever holds the interpreter; 0: none."""
    if hasattr(signal, "SIGALRM"):
        signal.alarm(math.ceil(seconds))


if __name__ == "__main__":
    main()
