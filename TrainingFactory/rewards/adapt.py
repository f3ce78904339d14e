"""Any callable as a reward: sync or async, on an episode, on a trajectory, or in TRL's shape.

    def short(trajectory): return float(len(trajectory.answer) < 80)
    async def judged(episode): return Reward(await ask(episode.trajectory.answer))
    def right(completions, answer, **columns): return [float(c == a) for c, a in zip(completions, answer)]

What comes back is checked: a number, a `Reward`, or None for "cannot score", which raises `Unscored`. Nothing that went
wrong ever counts as zero.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

from TrainingFactory.openai_form import message_to_dict
from TrainingFactory.protocols import Episode
from TrainingFactory.tools.texts import describe
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.tools.waiting import OutOfTime, SelfCancelled, within
from TrainingFactory.types import Message, Reward, Task, Trajectory

Shape = Literal["episode", "trajectory", "completions"]
_TRAJECTORY_NAMES = ("trajectory", "traj")


class Unscored(ValueError):
    """What an episode is worth is not known; the text says why."""


@dataclass(slots=True, frozen=True)
class Adapted:
    """A reward that always gives a checked `Reward` or raises. Made by `as_reward`."""

    function: Callable[..., Any]
    name: str
    shape: Shape
    timeout: float | None = None  # seconds for one call

    async def __call__(self, episode: Episode) -> Reward:
        if self.shape == "completions":
            [found] = await self.group([episode])
            if isinstance(found, Unscored):
                raise found
            return found
        subject = episode.trajectory if self.shape == "trajectory" else episode
        value = await self._limited(subject)
        return checked(value, len(episode.trajectory.turns), self.name)

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Unscored]:
        """Several episodes in one call, as TRL does it; only in its shape. For one that could not be scored there is
        the reason in its place."""
        if self.shape != "completions":
            raise ValueError(f"the reward {self.name} takes one {self.shape} at a time, not a group")
        trajectories = [episode.trajectory for episode in episodes]
        values = await self._limited(**_columns(self.function, trajectories, self.name))
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise Unscored(
                f"the reward {self.name} takes completions, so it must give a list with one number for each, "
                f"not {_shown(values)}"
            )
        if len(values) != len(episodes):
            raise Unscored(
                f"the reward {self.name} gave {len(values)} values for {len(episodes)} completions"
            )
        return [
            self._one_of_many(value, len(trajectory.turns))
            for value, trajectory in zip(values, trajectories, strict=True)
        ]

    def _one_of_many(self, value: Any, turns: int) -> Reward | Unscored:
        try:
            return checked(value, turns, self.name)
        except Unscored as error:
            return error

    async def _limited(self, *args: Any, **columns: Any) -> Any:
        try:
            return await within(self.timeout, self._called(*args, **columns))
        except OutOfTime:
            raise Unscored(f"the reward {self.name} took longer than {self.timeout:g} s") from None
        except SelfCancelled as error:
            raise Unscored(f"the reward {self.name} cancelled itself") from error

    async def _called(self, *args: Any, **columns: Any) -> Any:
        try:
            # One that is not async may block for long: not on the event loop.
            if inspect.iscoroutinefunction(self.function):
                return await self.function(*args, **columns)
            value = await in_thread(self.function, *args, **columns)
            return await value if inspect.isawaitable(value) else value
        except SystemExit as error:  # in a task it would end the loop, and with it all other episodes
            raise Unscored(f"the reward {self.name} tried to end the program") from error


def as_reward(function: Any, name: str | None = None, timeout: float | None = None) -> Adapted:
    """The callable as a reward; ValueError if it cannot be one. What it is given goes by its parameters: `completions`
    means TRL's shape, `trajectory` (or a type hint that says so) the trajectory, anything else the episode."""
    if isinstance(function, Adapted) and name is None and timeout is None:
        return function
    if isinstance(function, Adapted):
        return Adapted(function.function, name or function.name, function.shape, timeout or function.timeout)
    known_as = name or getattr(function, "__name__", type(function).__name__)
    if isinstance(function, type) or not callable(function):
        raise ValueError(
            f"the reward {known_as} is {_shown(function)}; it must be a function or callable object"
        )
    if timeout is not None and not timeout > 0:
        raise ValueError(f"the time-out of reward {known_as} is {timeout!r}; it must be over 0, or None")
    return Adapted(function, known_as, _shape(function, known_as), timeout)


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
        as_float(value.outcome, who),
        [as_float(paid, who) for paid in value.steps],
        {part: as_float(figure, who) for part, figure in value.parts.items()},
    )


def as_float(value: Any, who: str) -> float:
    """A finite number, whichever library it is of. A text is none, also if it looks like one."""
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, str | bytes | list | tuple | dict) or not isinstance(value, SupportsFloat):
        raise Unscored(
            f"{who} gave {_shown(value)}; it must give a number, a Reward, or None for 'cannot score'"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:  # an array of several numbers
        raise Unscored(f"{who} gave {_shown(value)}, which is not one number: {describe(error)}") from error
    if not math.isfinite(number):
        raise Unscored(f"{who} gave {number}; a reward must be finite")
    return number


def _shape(function: Callable[..., Any], name: str) -> Shape:
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
            "or (completions, **columns)"
        )
    hint = positional[0].annotation
    hinted = hint if isinstance(hint, str) else getattr(hint, "__name__", "")
    by_hint = hinted.rpartition(".")[2] == Trajectory.__name__
    return "trajectory" if by_hint or positional[0].name in _TRAJECTORY_NAMES else "episode"


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
