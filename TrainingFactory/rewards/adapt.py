"""Any callable as a reward: sync or async, on an episode, on a trajectory, on a group of them, or in TRL's shape.
Nothing that went wrong ever counts as zero."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pydantic import validate_call

from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.common.options import STRICT, Positive
from TrainingFactory.common.user_code import place_of
from TrainingFactory.protocols import Episode, GroupReward
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.tools.timeouts import OutOfTime, SelfCancelled, within
from TrainingFactory.types import Reward, Task, Trajectory

# "whole" is an object of ours that scores a group by its own method `group`.
Shape = Literal["episode", "trajectory", "episodes", "trajectories", "completions", "whole"]
_SEVERAL: dict[str, Shape] = {"trajectory": "trajectories", "episode": "episodes"}
_HINT = re.compile(
    r"(?P<several>(?i:list|tuple|sequence|iterable|collection)\[)?(?:\w+\.)*(?P<kind>Trajectory|Episode)\b"
)


class Unscored(ValueError):
    """Say why nobody knows what an episode is worth."""


def check_known(trajectory: Trajectory) -> None:
    """Raise Unscored for an episode that failed for reasons of its own."""
    if trajectory.status in ("error", "tool_failure"):
        raise Unscored(f"the episode ended with status {trajectory.status}: what it is worth is not known")


class NoSay(Unscored):
    """Say that a reward gave None."""


class BrokeOff(Unscored):
    """Say that a reward did not come to its end: it cancelled itself, or tried to end the program."""


@dataclass(slots=True, frozen=True)
class Adapted:
    """Give a checked `Reward` or raise. Made by `as_reward`."""

    function: Callable[..., Any]
    name: str
    shape: Shape
    timeout: float | None = None  # seconds for one call

    @property
    def grouped(self) -> bool:
        return self.shape not in ("episode", "trajectory")

    @property
    def compares(self) -> bool:
        """Tell whether episodes may be compared; a list of completions is scored one by one, as TRL does it."""
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
        """Score all episodes; one that could not be scored has the reason in its place."""
        if not self.grouped:
            return await one_by_one(self, episodes)
        values = await self._limited(self._together(episodes))
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != len(episodes):
            raise Unscored(
                f"the reward {self.name} scores a group: it must give a list with one number for each of "
                f"{len(episodes)} episodes, not {shown(values)}"
            )
        return list(map(self._entry, values, episodes))

    def _entry(self, value: Any, episode: Episode) -> Reward | Exception:
        if isinstance(value, Exception):
            return value
        try:
            return checked(value, len(episode.trajectory.turns), self.name)
        except Unscored as error:
            return error

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise ValueError if the reward takes columns that none of the tasks has."""
        if self.shape == "completions" and tasks:
            self.columns([Trajectory(task, group="") for task in tasks])

    async def _together(self, episodes: Sequence[Episode]) -> Any:
        if isinstance(self.function, GroupReward):
            return await self.function.group(episodes)
        if self.shape == "episodes":
            return await called(self.function, list(episodes))
        trajectories = [episode.trajectory for episode in episodes]
        if self.shape == "trajectories":
            return await called(self.function, trajectories)
        return await called(self.function, **self.columns(trajectories))

    def columns(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Return TRL's keywords as far as the function takes them; Unscored if the tasks lack one that it names."""
        tasks = [trajectory.task for trajectory in trajectories]
        keys = sorted({key for task in tasks for key in task.metadata})
        columns: dict[str, list[Any]] = {key: [task.metadata.get(key) for task in tasks] for key in keys}
        columns |= {
            "prompts": [
                task.prompt if isinstance(task.prompt, str) else list(map(message_to_dict, task.prompt))
                for task in tasks
            ],
            "completions": [_completion(trajectory) for trajectory in trajectories],
            "completion_ids": [
                [token for turn in trajectory.turns for token in turn.completion.token_ids]
                for trajectory in trajectories
            ],
            "answer": [task.answer for task in tasks],
            "task_id": [task.id for task in tasks],
        }
        parameters = inspect.signature(self.function).parameters.values()
        named = {each.name: each for each in parameters if each.kind != each.VAR_KEYWORD}
        missing = sorted(
            key for key, each in named.items() if each.default is each.empty and key not in columns
        )
        if missing:
            raise Unscored(
                f"the reward {self.name} asks for {', '.join(missing)}, which the tasks do not have; "
                f"they have {', '.join(sorted(columns))}"
            )
        takes_all = len(named) < len(parameters)
        return {key: column for key, column in columns.items() if takes_all or key in named}

    async def _limited(self, call: Coroutine[Any, Any, Any]) -> Any:
        async def kept_inside() -> Any:  # or it would end the loop
            try:
                return await call
            except SystemExit as error:
                raise BrokeOff(f"the reward {self.name}{place_of(error)} tried to end the program") from error

        try:
            return await within(self.timeout, kept_inside())
        except OutOfTime:
            raise Unscored(f"the reward {self.name} took longer than {self.timeout:g} s") from None
        except SelfCancelled:
            raise BrokeOff(f"the reward {self.name} cancelled itself") from None


@validate_call(config=STRICT)
def as_reward(function: Any, name: str | None = None, timeout: Positive | None = None) -> Adapted:
    """Return the callable as a reward with a time limit for each call; ValueError if it cannot be one."""
    if isinstance(function, Adapted):
        return replace(function, name=name or function.name, timeout=timeout or function.timeout)
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if isinstance(function, type) or not callable(function):
        raise ValueError(f"the reward {name} is {shown(function)}; it must be a function or callable object")
    return Adapted(function, name, _shape_of(function, name), timeout)


def _shape_of(function: Callable[..., Any], name: str) -> Shape:
    """Return what the function takes, by the name or type hint of its first parameter; else the episode."""
    if isinstance(function, GroupReward):
        return "whole" if function.grouped else "episode"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C: it does not say what it takes
        return "episode"
    parameters = signature.parameters
    if "completions" in parameters:
        return "completions"
    try:
        signature.bind(None)
    except TypeError:
        listed = ", ".join(map(str, parameters.values())) or "nothing"
        raise ValueError(
            f"the reward {name} takes {listed}; it must take one episode, one trajectory, "
            "episodes or trajectories (a list of them), or (completions, **columns)"
        ) from None
    first = next(iter(parameters.values()))
    hint = first.annotation
    found = _HINT.search(hint.__qualname__ if isinstance(hint, type) and not get_args(hint) else str(hint))
    takes = found["kind"].lower() if found else first.name
    if found and found["several"]:
        return _SEVERAL[takes]
    return takes if takes in get_args(Shape) else "episode"  # type: ignore[return-value]


def _completion(trajectory: Trajectory) -> str | list[dict[str, Any]]:
    """Write it as TRL does: the last text, cut or not, where the prompt is one, else all messages after the prompt."""
    if isinstance(trajectory.task.prompt, str):
        return trajectory.turns[-1].message.content if trajectory.turns else ""
    return [message_to_dict(each) for turn in trajectory.turns for each in (turn.message, *turn.replies)]


def checked(value: Any, turns: int, name: str) -> Reward:
    """Return the value as a `Reward`; raise Unscored if it is None, no finite number, or has the wrong length."""
    who = f"the reward {name}"
    if value is None:
        raise NoSay(f"{who} could not score it (it gave None)")
    if not isinstance(value, Reward):
        return Reward(as_float(value, who))
    if value.steps and len(value.steps) != turns:
        raise Unscored(f"{who} gave {len(value.steps)} step rewards for {turns} turns")
    return Reward(
        as_float(value.outcome, who, "as its outcome"),
        [as_float(step, who, f"for turn {turn}") for turn, step in enumerate(value.steps)],
        {part: as_float(number, who, f"as its part {part}") for part, number in value.parts.items()},
    )


def as_float(value: Any, who: str, what: str = "") -> float:
    """Return a finite number of any library as a float; `what` is for one that is not the whole reward."""
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several numbers
        number = math.nan
    if not math.isfinite(number):
        raise Unscored(
            f"{who} gave {shown(value)} {what}".rstrip() + "; it must give a number, which must be finite"
        )
    return number


def shown(value: Any) -> str:
    """Return the start of a value's repr with its type, for messages."""
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


async def called(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call the function: on the loop if it is async or says that it is `quick`, else on a thread, for it may block."""
    if getattr(function, "quick", None) is True:
        return function(*args, **keywords)
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
