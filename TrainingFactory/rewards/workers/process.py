"""Reward in a separate process, so that code that holds the GIL or crashes does not affect the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from TrainingFactory.common.user_code import describe_failure
from TrainingFactory.common.workers import Worker, WorkerDied, WorkerError, WorkerTooSlow
from TrainingFactory.data.trajectories import trajectory_from_dict, trajectory_to_dict
from TrainingFactory.protocols import Environment, Episode
from TrainingFactory.rewards.adapt import AdaptedReward, RewardAborted, Unscored, score_single
from TrainingFactory.rewards.loading import load_reward, with_absolute_path
from TrainingFactory.types import Reward, Task, ToolFailure, ToolResult, Trajectory

Rows = list[dict[str, Any]]
# Exceptions caused by the row; any other exception may be the worker's fault.
ROW_ERRORS = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    ToolFailure,
)
_JSON_ADAPTER: TypeAdapter[Any] = TypeAdapter(JsonValue)


class WorkerFailure(Exception):
    """Raised if a process cannot score any row, because it does not start or a resource of its reward is
    unavailable."""


@dataclass(slots=True)
class FinishedEpisode:
    """The episode of a stored trajectory. Its environment is closed."""

    trajectory: Trajectory

    @property
    def task(self) -> Task:
        return self.trajectory.task

    @property
    def environment(self) -> Environment:
        raise ToolFailure("the environment of this episode is closed; score it in the run's process")

    async def call(self, tool: str, **arguments: Any) -> ToolResult:
        raise ToolFailure(f"cannot call {tool}: the environment of this episode is closed")


class RewardProcess:
    """Reward that runs in a separate process, one call at a time. It has the import path `target`; with `options`, a
    factory at `target` makes it. A call that times out or crashes the process leaves its episodes unscored; the next
    call starts a new process."""

    def __init__(
        self,
        target: str,
        timeout: float = 300.0,
        options: Mapping[str, Any] | None = None,
        adapted_reward: AdaptedReward | None = None,  # if already loaded in this process
        make_worker: Callable[..., Any] = Worker,  # its process may be on another machine
    ) -> None:
        self.adapted_reward = adapted_reward or load_reward(target, options)
        self.grouped, self.compares = self.adapted_reward.grouped, self.adapted_reward.compares
        self.target, self.timeout = with_absolute_path(target), timeout
        self._worker = make_worker(f"{__name__}:load_scorer", {"target": self.target, "options": options})

    @property
    def alive(self) -> bool:
        return self._worker.alive

    async def __call__(self, episode: Episode) -> Reward:
        return await score_single(self, episode)

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        for episode in episodes:
            _check_json(episode.task)
        rows = [trajectory_to_dict(episode.trajectory) for episode in episodes]
        try:
            reply = await self._worker.ask(rows, self.timeout)
        except WorkerTooSlow:
            raise Unscored(
                f"the reward {self.adapted_reward.name} took longer than {self.timeout:g} s; its process was killed"
            ) from None
        except WorkerDied as error:
            raise ConnectionError(f"the process of the reward {self.target} {error}") from None
        except WorkerError as error:
            raise WorkerFailure(f"cannot start a process for the reward {self.target}: {error}") from None
        if "error" in reply:
            raise _failure_from_dict(reply)
        return [_failure_from_dict(row) if "error" in row else Reward(**row) for row in reply["rewards"]]

    def kill(self) -> None:
        """Kill the process; the next call starts a new one."""
        self._worker.kill()

    async def close(self) -> None:
        """End the process for good, even during a call."""
        await self._worker.close()


def _check_json(task: Task) -> None:
    """Raise Unscored for a task with non-JSON values, because JSON would change them and perhaps the reward."""
    fields: dict[str, Any] = {f"metadata.{key}": {key: value} for key, value in task.metadata.items()}
    for name, value in ({"answer": task.answer} | fields).items():
        try:
            _JSON_ADAPTER.validate_python(value, strict=True)
        except ValidationError:
            raise Unscored(
                f"task {task.id}: {name} is not JSON and cannot be sent to a worker process: {value!r:.80}; use JSON "
                "values (lists for tuples, strings for keys), or score in the run's process "
                "(optimization.distributed_reward: false; for a function processes: 0)"
            ) from None


def load_scorer(settings: dict[str, Any]) -> Callable[[Rows], dict[str, Any]]:
    """Load the reward in the worker process; return the function that scores the rows of one call."""
    reward = load_reward(settings["target"], settings["options"])
    runner = asyncio.Runner()  # one for all calls, because an async reward may keep a connection
    return lambda rows: runner.run(_score_rows(reward, rows))


async def _score_rows(reward: AdaptedReward, rows: Rows) -> dict[str, Any]:
    try:
        results = await reward.group([FinishedEpisode(trajectory_from_dict(row)) for row in rows])
    except Exception as error:  # rewards are user code
        return _failure_to_dict(error)
    rows = [
        _failure_to_dict(result) if isinstance(result, Exception) else asdict(result) for result in results
    ]
    return {"rewards": rows}


def is_row_error(error: Exception) -> bool:
    return isinstance(error, ROW_ERRORS) and not isinstance(error, RewardAborted)


def _failure_to_dict(error: Exception) -> dict[str, Any]:
    return {"error": describe_failure(error), "own": is_row_error(error)}


def _failure_from_dict(row: dict[str, Any]) -> Exception:
    return (Unscored if row["own"] else WorkerFailure)(row["error"])
