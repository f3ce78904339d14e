"""A reward in a process of its own: what holds the interpreter, or may bring it down, then does so to itself only.

Run as a module it is that process. One line of JSON goes in for each trajectory, one comes back.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from TrainingFactory.data.trajectories import trajectory_from_dict, trajectory_to_dict
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.tools.texts import describe
from TrainingFactory.types import Reward, Task, ToolFailure, ToolResult, Trajectory

CLOSING_SECONDS = 2.0


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


def checked_reward(value: Any) -> Reward:
    """What a reward gave, as a Reward; TypeError or ValueError where that is none."""
    if not isinstance(value, Reward):
        if isinstance(value, str | None):
            raise TypeError(f"a reward must be a number or a Reward, not {value!r:.40}")
        value = Reward(float(value))
    if not all(math.isfinite(number) for number in (value.outcome, *value.steps)):
        raise ValueError(f"a reward must be finite, not {value}")
    return value


class ProcessReward:
    """`target` is `package.module:function`, a reward that the process imports. One row at a time; a process that has
    died, or takes longer than `timeout`, is ended, that row raises ConnectionError, and the next one starts another."""

    def __init__(self, target: str, timeout: float = 300.0) -> None:
        module, colon, name = target.partition(":")
        if not colon or not module or not name.isidentifier():
            raise ValueError(f"model is {target!r}; a reward for processes is named package.module:function")
        self.target, self.timeout = target, timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, episode: Episode) -> Reward:
        line = json.dumps(trajectory_to_dict(episode.trajectory))
        with self._lock:
            answer = self._exchange(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return Reward(**answer)

    def _exchange(self, line: str) -> dict[str, Any]:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(self.timeout, process.kill)
        late.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            said = process.stdout.readline()
        except OSError:
            said = ""
        finally:
            late.cancel()
        if not said.endswith("\n"):
            self._end()
            raise ConnectionError(f"the process of {self.target} is gone")
        return json.loads(said)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "TrainingFactory.rewards.processes", self.target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        return self._process

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
        with self._lock:
            self._end()


def main(target: str) -> None:
    """Answers until its input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the reward prints must not get among the answers
    module, _, name = target.partition(":")
    reward: Any = getattr(import_module(module), name)
    for line in sys.stdin:
        try:
            value = reward(FinishedEpisode(trajectory_from_dict(json.loads(line))))
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            answer = asdict(checked_reward(value))
        except Exception as error:  # rewards are foreign code
            answer = {"error": describe(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main(sys.argv[1])
