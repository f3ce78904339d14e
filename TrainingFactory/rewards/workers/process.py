"""A reward in a process of its own: what holds the interpreter, or may bring it down, then does so to itself only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from TrainingFactory.data.trajectories import trajectory_to_dict
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import Adapted, Unscored, alone
from TrainingFactory.rewards.loading import load_reward, with_whole_path
from TrainingFactory.rewards.workers.failures import WorkerFailure, failure_from_dict
from TrainingFactory.types import Reward, Task
from TrainingFactory.workers import Worker, WorkerDied, WorkerError, WorkerTooSlow


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
        self.like = like or load_reward(target, options)
        self.target, self.timeout = with_whole_path(target), timeout
        settings = {"target": self.target, "options": options}
        self._worker = Worker("TrainingFactory.rewards.workers.child:start", settings)

    @property
    def grouped(self) -> bool:
        return self.like.grouped

    @property
    def compares(self) -> bool:
        return self.like.compares

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
            raise failure_from_dict(answer)
        return [failure_from_dict(each) if "error" in each else Reward(**each) for each in answer["rewards"]]

    def kill(self) -> None:
        """End the process at once; the next call starts another."""
        self._worker.kill()

    async def close(self) -> None:
        """End the process, also in the middle of a call; there will be no other."""
        await self._worker.close()


def _check_json(task: Task) -> None:
    """Raise Unscored for a task that would be another one there: its reward may be another one too."""
    parts = {"answer": task.answer} | {
        f"metadata.{key}": {key: value} for key, value in task.metadata.items()
    }
    for name, part in parts.items():
        if not _is_json(part):
            raise Unscored(
                f"task {task.id}: {name} cannot go to a process as it is: {part!r:.80}; make it what JSON has (a list "
                "for a tuple, a text for a key), or score it in this process (processes: 0)"
            )


def _is_json(value: Any) -> bool:
    """Return whether JSON gives back what it gets."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)
