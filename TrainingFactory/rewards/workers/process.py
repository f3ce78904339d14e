"""A reward in a process of its own: what holds the interpreter, or may bring it down, then does so to itself only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from TrainingFactory.common.user_code import failure
from TrainingFactory.common.workers import Worker, WorkerDied, WorkerError, WorkerTooSlow
from TrainingFactory.data.trajectories import trajectory_from_dict, trajectory_to_dict
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.adapt import Adapted, BrokeOff, Unscored, alone
from TrainingFactory.rewards.loading import load_reward, with_whole_path
from TrainingFactory.types import Reward, Task, ToolFailure, ToolResult, Trajectory

Rows = list[dict[str, Any]]
# What a reward raises at a row that it does not understand; anything else may be the worker's.
ROWS_OWN = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, ToolFailure)
_JSON: TypeAdapter[Any] = TypeAdapter(JsonValue)


class WorkerFailure(Exception):
    """Say that a process could not score anything: it cannot be started, or what its reward needs is out of reach."""


@dataclass(slots=True)
class FinishedEpisode:
    """Hold a trajectory as a reward wants it, long after its environment was closed."""

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
    """Run the reward at `target`, or what the function there makes of `options`, in a process, one call at a time. A
    call that takes too long, or brings the process down, costs its episodes; the next one starts another."""

    def __init__(
        self,
        target: str,
        timeout: float = 300.0,
        options: Mapping[str, Any] | None = None,
        like: Adapted | None = None,  # the same reward in this process, where it has been loaded already
        worker: Callable[..., Any] = Worker,  # whose process may be on another machine
    ) -> None:
        self.like = like or load_reward(target, options)
        self.grouped, self.compares = self.like.grouped, self.like.compares
        self.target, self.timeout = with_whole_path(target), timeout
        self._worker = worker(f"{__name__}:start", {"target": self.target, "options": options})

    @property
    def alive(self) -> bool:
        return self._worker.alive

    async def __call__(self, episode: Episode) -> Reward:
        return await alone(self, episode)

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        for episode in episodes:
            _check_json(episode.task)
        rows = [trajectory_to_dict(each.trajectory) for each in episodes]
        try:
            answer = await self._worker.ask(rows, self.timeout)
        except WorkerTooSlow:
            raise Unscored(
                f"the reward {self.like.name} took longer than {self.timeout:g} s, and its process was ended"
            ) from None
        except WorkerDied as error:
            raise ConnectionError(f"the process of {self.target} {error}") from None
        except WorkerError as error:
            raise WorkerFailure(f"a process for {self.target} could not be started: {error}") from None
        if "error" in answer:
            raise _failure_from_dict(answer)
        return [_failure_from_dict(each) if "error" in each else Reward(**each) for each in answer["rewards"]]

    def kill(self) -> None:
        """End the process at once; the next call starts another."""
        self._worker.kill()

    async def close(self) -> None:
        """End the process, also in the middle of a call; there will be no other."""
        await self._worker.close()


def _check_json(task: Task) -> None:
    """Raise Unscored for a task that would be another one there: its reward may be another one too."""
    parts = {"answer": task.answer} | {f"metadata.{key}": {key: each} for key, each in task.metadata.items()}
    for name, part in parts.items():
        try:
            _JSON.validate_python(part, strict=True)
        except ValidationError:
            raise Unscored(
                f"task {task.id}: {name} cannot go to a worker process as it is: {part!r:.80}; use JSON values (a list "
                "for a tuple, a text for a key), or score in the run's process (optimization.distributed_reward: "
                "false; for a function processes: 0)"
            ) from None


def start(settings: dict[str, Any]) -> Callable[[Rows], dict[str, Any]]:
    """Load the reward inside the process, and return what scores the trajectories of one call."""
    reward = load_reward(settings["target"], settings["options"])
    runner = asyncio.Runner()  # one for all calls: an async reward may keep a connection
    return lambda rows: runner.run(_score(reward, rows))


async def _score(reward: Adapted, rows: Rows) -> dict[str, Any]:
    try:
        found = await reward.group([FinishedEpisode(trajectory_from_dict(row)) for row in rows])
    except Exception as error:  # rewards are foreign code
        return _failure_to_dict(error)
    made = [_failure_to_dict(each) if isinstance(each, Exception) else asdict(each) for each in found]
    return {"rewards": made}


def is_rows_own(error: Exception) -> bool:
    return isinstance(error, ROWS_OWN) and not isinstance(error, BrokeOff)


def _failure_to_dict(error: Exception) -> dict[str, Any]:
    return {"error": failure(error), "own": is_rows_own(error)}


def _failure_from_dict(told: dict[str, Any]) -> Exception:
    return (Unscored if told["own"] else WorkerFailure)(told["error"])
