"""Any callable as a reward: sync or async, on an episode, on a trajectory, on a group of them, or in TRL's shape.

    def short(trajectory): return float(len(trajectory.answer) < 80)
    async def judged(episode): return Reward(await ask(episode.trajectory.answer))
    def shortest(trajectories): return [-len(each.answer) for each in trajectories]
    def right(completions, answer, **columns): return [float(c == a) for c, a in zip(completions, answer)]

The last two get all episodes of a group in one call. shapes.py reads what a callable takes, values.py checks what it
gives: a number, a `Reward`, or None for "cannot score", which raises `Unscored`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from TrainingFactory.protocols import Episode, GroupReward
from TrainingFactory.rewards.shapes import SINGLE, Shape, columns_for, shape_of
from TrainingFactory.rewards.values import BrokeOff, Unscored, checked, shown
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.tools.waiting import OutOfTime, within
from TrainingFactory.types import Reward, Task, Trajectory
from TrainingFactory.user_code import place_of


def as_reward(function: Any, name: str | None = None, timeout: float | None = None) -> Adapted:
    """Return the callable as a reward with a time limit for each call; ValueError if it cannot be one. Its parameters
    say what it is given: `completions` means TRL's shape, `trajectory` (or a type hint that says so) the trajectory,
    `episodes` or `trajectories` (or a hint such as list[Trajectory]) a whole group, anything else the episode."""
    own_name = function.name if isinstance(function, Adapted) else getattr(function, "__name__", None)
    known_as = name or own_name or type(function).__name__
    if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout < math.inf):
        raise ValueError(
            f"the timeout of reward {known_as} is {timeout!r}; it must be a number of seconds, over 0"
        )
    if isinstance(function, Adapted):
        return replace(function, name=known_as, timeout=timeout or function.timeout)
    if isinstance(function, type) or not callable(function):
        raise ValueError(
            f"the reward {known_as} is {shown(function)}; it must be a function or callable object"
        )
    return Adapted(function, known_as, shape_of(function, known_as), timeout)


@dataclass(slots=True, frozen=True)
class Adapted:
    """A reward that always gives a checked `Reward` or raises. Made by `as_reward`."""

    function: Callable[..., Any]
    name: str
    shape: Shape
    timeout: float | None = None  # seconds for one call

    @property
    def grouped(self) -> bool:
        return self.shape not in SINGLE

    @property
    def compares(self) -> bool:
        """A list of completions is scored one by one, as TRL does it; whoever takes episodes may compare them."""
        if isinstance(self.function, GroupReward):
            return self.function.compares
        return self.shape in ("episodes", "trajectories")

    async def __call__(self, episode: Episode) -> Reward:
        if self.grouped:
            return await alone(self, episode)
        subject = episode.trajectory if self.shape == "trajectory" else episode
        value = await self._limited(called(self.function, subject))
        return checked(value, len(episode.trajectory.turns), self.name)

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        """Score all episodes in one call, or at the same time where the reward takes one. An episode that could not be
        scored has the reason in its place."""
        if not self.grouped:
            return await one_by_one(self, episodes)
        values = await self._limited(self._together(episodes))
        takes = "episodes" if self.shape == "whole" else self.shape
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise Unscored(
                f"the reward {self.name} takes {takes}, so it must give a list with one number for each, "
                f"not {shown(values)}"
            )
        if len(values) != len(episodes):
            raise Unscored(f"the reward {self.name} gave {len(values)} values for {len(episodes)} {takes}")
        found: list[Reward | Exception] = []
        for value, episode in zip(values, episodes, strict=True):
            try:
                found.append(
                    value
                    if isinstance(value, Exception)
                    else checked(value, len(episode.trajectory.turns), self.name)
                )
            except Unscored as error:
                found.append(error)
        return found

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise ValueError if the reward takes columns that none of the tasks has."""
        if self.shape == "completions" and tasks:
            columns_for(self.function, [Trajectory(task, group="") for task in tasks], self.name)

    async def _together(self, episodes: Sequence[Episode]) -> Any:
        if self.shape == "whole":
            assert isinstance(self.function, GroupReward)
            return await self.function.group(episodes)
        if self.shape == "episodes":
            return await called(self.function, list(episodes))
        trajectories = [episode.trajectory for episode in episodes]
        if self.shape == "trajectories":
            return await called(self.function, trajectories)
        return await called(self.function, **columns_for(self.function, trajectories, self.name))

    async def _limited(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await within(self.timeout, self._kept_inside(call))
        except OutOfTime:
            raise Unscored(f"the reward {self.name} took longer than {self.timeout:g} s") from None

    async def _kept_inside(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await the call; what would end its task or the loop becomes BrokeOff."""
        try:
            return await call
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise BrokeOff(f"the reward {self.name}{place_of(error)} cancelled itself") from error
        except SystemExit as error:
            raise BrokeOff(f"the reward {self.name}{place_of(error)} tried to end the program") from error


async def called(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call the function: on the loop if it is async, else on a thread, because it may block for long or start an event
    loop of its own."""
    code = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(code):
        return await function(*args, **keywords)
    value = await in_thread(function, *args, **keywords)
    return await value if inspect.isawaitable(value) else value


async def alone(reward: GroupReward, episode: Episode) -> Reward:
    """Score a group of one; Unscored if the reward compares."""
    if reward.compares:
        raise Unscored(
            "this reward compares the episodes of a group, and here it is asked about one of them; it can stand alone, "
            "or among the parts of a Combined"
        )
    [found] = await reward.group([episode])
    if isinstance(found, Exception):
        raise found
    return found


async def one_by_one(
    reward: Callable[[Episode], Any], episodes: Sequence[Episode]
) -> list[Reward | Exception]:
    """Score a group by a reward that takes one episode: all at the same time, each for itself."""
    found: list[Any] = await asyncio.gather(*map(reward, episodes), return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, Exception):
            raise each
    return found


def group_reward(reward: Any) -> GroupReward | None:
    """Return the reward as one that scores whole groups; None if it is not made for that."""
    if reward is None:
        return None
    made = reward if isinstance(reward, GroupReward) else as_reward(reward)
    return made if made.grouped else None


def compares(reward: Any) -> bool:
    """Return true if the reward goes by comparing the episodes of a group."""
    group = group_reward(reward)
    return group is not None and group.compares


async def environment_reward(episode: Episode) -> Reward:
    """Return what the environment's own `reward` method gives, to be combined with others."""
    own = getattr(episode.environment, "reward", None)
    if own is None:
        raise Unscored(f"{type(episode.environment).__name__} has no reward method of its own")
    return await Adapted(own, "environment", "episode")(episode)
