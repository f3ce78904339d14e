"""Any callable as a reward: sync or async, on an episode, on a trajectory, on a group of them, or in TRL's shape.

    def short(trajectory): return float(len(trajectory.answer) < 80)
    async def judged(episode): return Reward(await ask(episode.trajectory.answer))
    def shortest(trajectories): return [-len(each.answer) for each in trajectories]
    def right(completions, answer, **columns): return [float(c == a) for c, a in zip(completions, answer)]

The last two get all episodes of a group in one call. What comes back is checked: a number, a `Reward`, or None for
"cannot score", which raises `Unscored`. Nothing that went wrong ever counts as zero.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat, get_args

from TrainingFactory.openai_form import message_to_dict
from TrainingFactory.protocols import Episode, GroupReward
from TrainingFactory.rewards.checks import check_seconds
from TrainingFactory.texts import describe
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.tools.waiting import OutOfTime, within
from TrainingFactory.types import Message, Reward, Task, Trajectory
from TrainingFactory.user_code import place_of

# What one call is given. "whole" is a reward that knows itself how to score a group.
Shape = Literal["episode", "trajectory", "episodes", "trajectories", "completions", "whole"]
SINGLE = ("episode", "trajectory")
WHOLE = "a number, a Reward, or None for 'cannot score'"
_NAMES: dict[str, Shape] = {"traj": "trajectory", "trajs": "trajectories"}
_NAMES |= {name: name for name in get_args(Shape) if name != "whole"}
_HINTS: dict[str, tuple[Shape, Shape]] = {
    "Trajectory": ("trajectory", "trajectories"),
    "Episode": ("episode", "episodes"),
}


class Unscored(ValueError):
    """What an episode is worth is not known; the text says why."""


class BrokeOff(Unscored):
    """The reward did not come to its end: it cancelled itself, or tried to end the program."""


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
        if self.shape == "whole":
            return self._own.compares
        return self.shape in ("episodes", "trajectories")

    @property
    def _own(self) -> GroupReward:
        assert isinstance(self.function, GroupReward)
        return self.function

    async def __call__(self, episode: Episode) -> Reward:
        if self.grouped:
            return await alone(self, episode)
        subject = episode.trajectory if self.shape == "trajectory" else episode
        value = await self._limited(called(self.function, subject))
        return checked(value, len(episode.trajectory.turns), self.name)

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        """All of them in one call, or where the reward takes one at a time, all at the same time. For one that could
        not be scored there is the reason in its place."""
        if not self.grouped:
            return await one_by_one(self, episodes)
        values = await self._limited(self._together(episodes))
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise Unscored(
                f"the reward {self.name} takes {self._takes}, so it must give a list with one number for each, "
                f"not {_shown(values)}"
            )
        if len(values) != len(episodes):
            raise Unscored(
                f"the reward {self.name} gave {len(values)} values for {len(episodes)} {self._takes}"
            )
        return [
            self._one_of_many(value, len(episode.trajectory.turns))
            for value, episode in zip(values, episodes, strict=True)
        ]

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """ValueError if it takes columns that none of the tasks has."""
        if self.shape == "completions" and tasks:
            _columns(self.function, [Trajectory(task, group="") for task in tasks], self.name)

    @property
    def _takes(self) -> str:
        return "episodes" if self.shape == "whole" else self.shape

    async def _together(self, episodes: Sequence[Episode]) -> Any:
        if self.shape == "whole":
            return await self._own.group(episodes)
        if self.shape == "episodes":
            return await called(self.function, list(episodes))
        trajectories = [episode.trajectory for episode in episodes]
        if self.shape == "trajectories":
            return await called(self.function, trajectories)
        return await called(self.function, **_columns(self.function, trajectories, self.name))

    def _one_of_many(self, value: Any, turns: int) -> Reward | Exception:
        if isinstance(value, Exception):
            return value
        try:
            return checked(value, turns, self.name)
        except Unscored as error:
            return error

    async def _limited(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self.timeout is None:
            return await self._staying(call)
        try:
            return await within(self.timeout, self._staying(call))
        except OutOfTime:
            raise Unscored(f"the reward {self.name} took longer than {self.timeout:g} s") from None

    async def _staying(self, call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise BrokeOff(f"the reward {self.name}{place_of(error)} cancelled itself") from error
        except SystemExit as error:  # in a task it would end the loop, and with it all other episodes
            raise BrokeOff(f"the reward {self.name}{place_of(error)} tried to end the program") from error


async def called(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """One that is not async may block for long, or start an event loop of its own: not on ours."""
    code = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(code):
        return await function(*args, **keywords)
    value = await in_thread(function, *args, **keywords)
    return await value if inspect.isawaitable(value) else value


async def alone(reward: GroupReward, episode: Episode) -> Reward:
    """A group of one."""
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
    """A group by a reward that takes one episode: all at the same time, each for itself."""
    found: list[Any] = await asyncio.gather(*map(reward, episodes), return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, Exception):
            raise each
    return found


def as_reward(function: Any, name: str | None = None, timeout: float | None = None) -> Adapted:
    """The callable as a reward; ValueError if it cannot be one. What it is given goes by its parameters: `completions`
    means TRL's shape, `trajectory` (or a type hint that says so) the trajectory, `episodes` or `trajectories` (or a
    hint such as list[Trajectory]) a whole group, anything else the episode."""
    if isinstance(function, Adapted) and name is None and timeout is None:
        return function
    own_name = function.name if isinstance(function, Adapted) else getattr(function, "__name__", None)
    known_as = name or own_name or type(function).__name__
    if timeout is not None:
        check_seconds(f"the timeout of reward {known_as}", timeout)
    if isinstance(function, Adapted):
        return Adapted(function.function, known_as, function.shape, timeout or function.timeout)
    if isinstance(function, type) or not callable(function):
        raise ValueError(
            f"the reward {known_as} is {_shown(function)}; it must be a function or callable object"
        )
    return Adapted(function, known_as, _shape(function, known_as), timeout)


def group_reward(reward: Any) -> GroupReward | None:
    """The reward as one that scores whole groups, if it is made for that."""
    if reward is None:
        return None
    made = reward if isinstance(reward, GroupReward) else as_reward(reward)
    return made if made.grouped else None


def compares(reward: Any) -> bool:
    """Whether the reward pays by comparing the episodes of a group."""
    group = group_reward(reward)
    return group is not None and group.compares


async def environment_reward(episode: Episode) -> Reward:
    """What the environment's own `reward` method gives, to be combined with others."""
    own = getattr(episode.environment, "reward", None)
    if own is None:
        raise Unscored(f"{type(episode.environment).__name__} has no reward method of its own")
    return await Adapted(own, "environment", "episode")(episode)


def checked(value: Any, turns: int, name: str) -> Reward:
    """What a reward gave, as a `Reward`; `Unscored` if it is None, no number, not finite, or of the wrong length."""
    if value is None:
        raise Unscored(f"the reward {name} could not score it (it gave None)")
    who = f"the reward {name}"
    if not isinstance(value, Reward):
        return Reward(as_float(value, who))
    if value.steps and len(value.steps) != turns:
        raise Unscored(f"{who} gave {len(value.steps)} step rewards for {turns} turns")
    return Reward(
        as_float(value.outcome, who, "as its outcome"),
        [as_float(paid, who, f"for turn {turn}") for turn, paid in enumerate(value.steps)],
        {part: as_float(figure, who, f"as its part {part}") for part, figure in value.parts.items()},
    )


def as_float(value: Any, who: str, what: str = "") -> float:
    """A finite number, whichever library it is of. A text is none, also if it looks like one. `what` is said of a
    number that is not the whole reward."""
    if type(value) is float and math.isfinite(value):
        return value
    shown = f"{_shown(value)} {what}".rstrip()
    if isinstance(value, str | bytes | list | tuple | dict) or not isinstance(value, SupportsFloat):
        raise Unscored(f"{who} gave {shown}; it must give {'a number' if what else WHOLE}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # an array of several numbers
        raise Unscored(f"{who} gave {shown}, which is not one number: {describe(error)}") from error
    if not math.isfinite(number):
        raise Unscored(f"{who} gave {shown}; a reward must be finite")
    return number


def _shape(function: Callable[..., Any], name: str) -> Shape:
    if isinstance(function, GroupReward):
        return "whole" if function.grouped else "episode"
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C: it does not say what it takes
        return "episode"
    if any(parameter.name == "completions" for parameter in parameters):
        return "completions"
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters) and not required:
        return "episode"
    if not positional or any(parameter is not positional[0] for parameter in required):
        listed = ", ".join(str(parameter) for parameter in parameters) or "nothing"
        raise ValueError(
            f"the reward {name} takes {listed}; it must take one episode, one trajectory, "
            "episodes or trajectories (a list of them), or (completions, **columns)"
        )
    return _by_hint(positional[0].annotation) or _NAMES.get(positional[0].name, "episode")


def _by_hint(hint: Any) -> Shape | None:
    """From Trajectory, "Trajectory | None", list[types.Trajectory] and the like."""
    text = hint.__qualname__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    text = re.sub(r"^(?:\w+\.)*Optional\[(.*)\]$", r"\1", text.removesuffix("| None").strip())
    several = r"(?:(?:\w+\.)*(?:list|tuple|sequence|iterable|collection)(\[))?"
    found = re.fullmatch(several + r"(?:\w+\.)*(Trajectory|Episode)(?:, \.\.\.)?\]?", text, re.IGNORECASE)
    return _HINTS[found[2]][found[1] is not None] if found else None


def _columns(function: Callable[..., Any], trajectories: Sequence[Trajectory], name: str) -> dict[str, Any]:
    """TRL's keywords: completions, prompts, and every column of the tasks, each a list with one entry per episode.
    A function without **columns gets those that it names."""
    tasks = [trajectory.task for trajectory in trajectories]
    keys = sorted({key for task in tasks for key in task.metadata})
    columns: dict[str, list[Any]] = {key: [task.metadata.get(key) for task in tasks] for key in keys}
    columns |= {
        "prompts": [_prompt(task) for task in tasks],
        "completions": [_completion(trajectory) for trajectory in trajectories],
        "completion_ids": [_sampled(trajectory) for trajectory in trajectories],
        "answer": [task.answer for task in tasks],
        "task_id": [task.id for task in tasks],
    }
    parameters = inspect.signature(function).parameters.values()
    wanted = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in parameters if p.name in wanted and p.default is p.empty}
    if missing := sorted(needed - columns.keys()):
        raise Unscored(
            f"the reward {name} asks for {', '.join(missing)}, which the tasks do not have; "
            f"they have {', '.join(sorted(columns))}"
        )
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return columns
    return {key: value for key, value in columns.items() if key in wanted}


def _prompt(task: Task) -> str | list[dict[str, Any]]:
    return task.prompt if isinstance(task.prompt, str) else [message_to_dict(one) for one in task.prompt]


def _completion(trajectory: Trajectory) -> str | list[dict[str, Any]]:
    """As TRL writes it: a text where the prompt is one (the model's answer, nothing that a tool said), else all
    messages that came after the prompt."""
    if isinstance(trajectory.task.prompt, str):
        return trajectory.answer
    messages: list[Message] = []
    for turn in trajectory.turns:
        messages += [turn.message, *turn.replies]
    return [message_to_dict(message) for message in messages]


def _sampled(trajectory: Trajectory) -> list[int]:
    return [token for turn in trajectory.turns for token in turn.completion.token_ids]


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
