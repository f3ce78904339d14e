"""Adapter from callables to rewards: sync or async functions of an episode, a trajectory, a group of either, or with
TRL's signature. A failure raises and never counts as a zero reward."""

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
from TrainingFactory.common.user_code import locate_error
from TrainingFactory.protocols import Episode, GroupReward
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.tools.timeouts import OutOfTime, SelfCancelled, run_within
from TrainingFactory.types import Reward, Task, Trajectory, Turn

# "whole": a `GroupReward`, which scores a group with its own method `group`.
RewardSignature = Literal["episode", "trajectory", "episodes", "trajectories", "completions", "whole"]
_GROUP_SIGNATURES: dict[str, RewardSignature] = {"trajectory": "trajectories", "episode": "episodes"}
_HINT_RE = re.compile(
    r"(?P<several>(?i:list|tuple|sequence|iterable|collection)\[)?(?:\w+\.)*(?P<kind>Trajectory|Episode)\b"
)


class Unscored(ValueError):
    """Raised for an episode that cannot be scored; the text gives the reason."""


def check_scorable(trajectory: Trajectory) -> None:
    """Raise Unscored for an episode that failed because of an error, not because of the model's answer."""
    if trajectory.status in ("error", "tool_failure"):
        raise Unscored(f"the episode failed with status {trajectory.status}, so it cannot be scored")


class NoReward(Unscored):
    """Raised when a reward returns None."""


class RewardAborted(Unscored):
    """Raised when a reward does not finish: it cancelled its own task or raised SystemExit."""


@dataclass(slots=True, frozen=True)
class AdaptedReward:
    """A reward made from a callable by `as_reward`. It returns a validated `Reward` or raises."""

    function: Callable[..., Any]
    name: str
    signature: RewardSignature
    timeout: float | None = None  # seconds for one call

    @property
    def grouped(self) -> bool:
        return self.signature not in ("episode", "trajectory")

    @property
    def compares(self) -> bool:
        """Return whether the reward may compare episodes. TRL's completions are scored independently."""
        if isinstance(self.function, GroupReward):
            return self.function.compares
        return self.signature in ("episodes", "trajectories")

    async def __call__(self, episode: Episode) -> Reward:
        if self.grouped:
            return await score_single(self, episode)
        argument = episode.trajectory if self.signature == "trajectory" else episode
        result = await self._run_with_timeout(call_function(self.function, argument))
        return validate_reward(result, episode.trajectory.turns, self.name)

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        """Score all episodes; return one reward per episode, or the exception where the reward failed."""
        if not self.grouped:
            return await score_independently(self, episodes)
        results = await self._run_with_timeout(self._score_together(episodes))
        if isinstance(results, str) or not isinstance(results, Sequence) or len(results) != len(episodes):
            raise Unscored(
                f"the group reward {self.name} returned {short_repr(results)}; it must return a list with one number "
                f"for each of the {len(episodes)} episodes"
            )
        return list(map(self._validate_result, results, episodes))

    def _validate_result(self, result: Any, episode: Episode) -> Reward | Exception:
        if isinstance(result, Exception):
            return result
        try:
            return validate_reward(result, episode.trajectory.turns, self.name)
        except Unscored as error:
            return error

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise ValueError if a parameter of the reward names a column that no task has."""
        if self.signature == "completions" and tasks:
            self.make_columns([Trajectory(task, group="") for task in tasks])

    async def _score_together(self, episodes: Sequence[Episode]) -> Any:
        if isinstance(self.function, GroupReward):
            return await self.function.group(episodes)
        if self.signature == "episodes":
            return await call_function(self.function, list(episodes))
        trajectories = [episode.trajectory for episode in episodes]
        if self.signature == "trajectories":
            return await call_function(self.function, trajectories)
        return await call_function(self.function, **self.make_columns(trajectories))

    def make_columns(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        """Return TRL's keyword arguments that the function accepts; raise Unscored if a required one is missing."""
        tasks = [trajectory.task for trajectory in trajectories]
        keys = sorted({key for task in tasks for key in task.metadata})
        columns: dict[str, list[Any]] = {key: [task.metadata.get(key) for task in tasks] for key in keys}
        columns |= {
            "prompts": [
                task.prompt if isinstance(task.prompt, str) else list(map(message_to_dict, task.prompt))
                for task in tasks
            ],
            "completions": [_build_completion(trajectory) for trajectory in trajectories],
            "completion_ids": [
                [token for turn in trajectory.turns for token in turn.completion.token_ids]
                for trajectory in trajectories
            ],
            "answer": [task.answer for task in tasks],
            "task_id": [task.id for task in tasks],
        }
        parameters = inspect.signature(self.function).parameters.values()
        named_parameters = [parameter for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
        required = {parameter.name for parameter in named_parameters if parameter.default is parameter.empty}
        if missing_columns := sorted(required - columns.keys()):
            raise Unscored(
                f"the reward {self.name} requires the columns {', '.join(missing_columns)}, which the tasks do not "
                f"have; available columns: {', '.join(sorted(columns))}"
            )
        if len(named_parameters) < len(parameters):  # **columns takes all
            return columns
        return {
            parameter.name: columns[parameter.name]
            for parameter in named_parameters
            if parameter.name in columns
        }

    async def _run_with_timeout(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def contain_exit() -> Any:  # SystemExit would stop the event loop
            try:
                return await coroutine
            except SystemExit as error:
                raise RewardAborted(
                    f"the reward {self.name}{locate_error(error)} tried to end the program"
                ) from error

        try:
            return await run_within(self.timeout, contain_exit())
        except OutOfTime:
            raise Unscored(f"the reward {self.name} took longer than {self.timeout:g} s") from None
        except SelfCancelled:
            raise RewardAborted(f"the reward {self.name} cancelled itself") from None


@validate_call(config=STRICT)
def as_reward(function: Any, name: str | None = None, timeout: Positive | None = None) -> AdaptedReward:
    """Adapt a callable to a reward; `timeout` limits each call, in seconds. Raise ValueError if the callable cannot be
    a reward."""
    if isinstance(function, AdaptedReward):
        return replace(function, name=name or function.name, timeout=timeout or function.timeout)
    name = name or str(getattr(function, "__name__", type(function).__name__))
    if isinstance(function, type) or not callable(function):
        raise ValueError(
            f"the reward {name} is {short_repr(function)}; it must be a function or callable object"
        )
    return AdaptedReward(function, name, _infer_signature(function, name), timeout)


def _infer_signature(function: Callable[..., Any], name: str) -> RewardSignature:
    """Infer the reward's input from the name or type hint of the first parameter; default: the episode."""
    if isinstance(function, GroupReward):
        return "whole" if function.grouped else "episode"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a C function has no signature
        return "episode"
    parameters = signature.parameters
    if "completions" in parameters:
        return "completions"
    try:
        signature.bind(None)
    except TypeError:
        parameter_list = ", ".join(map(str, parameters.values())) or "nothing"
        raise ValueError(
            f"the reward {name} takes {parameter_list}; it must take one episode, one trajectory, "
            "episodes or trajectories (a list of them), or (completions, **columns)"
        ) from None
    parameter = next(iter(parameters.values()))
    hint = parameter.annotation
    match = _HINT_RE.search(hint.__qualname__ if isinstance(hint, type) and not get_args(hint) else str(hint))
    input_name = match["kind"].lower() if match else parameter.name
    if match and match["several"]:
        return _GROUP_SIGNATURES[input_name]
    return input_name if input_name in get_args(RewardSignature) else "episode"  # type: ignore[return-value]


def _build_completion(trajectory: Trajectory) -> str | list[dict[str, Any]]:
    """Return TRL's completion: the last text (truncated or not) for a string prompt, else the model's messages."""
    if isinstance(trajectory.task.prompt, str):
        answers = [turn.message.content for turn in trajectory.turns if not turn.summary]
        return answers[-1] if answers else ""
    messages = [message for turn in trajectory.turns for message in (turn.message, *turn.replies)]
    return list(map(message_to_dict, messages))


def validate_reward(value: Any, turns: Sequence[Turn], name: str) -> Reward:
    """Convert a value to a `Reward` with zero steps for missing summaries; raise Unscored if it is invalid."""
    subject = f"the reward {name}"
    if value is None:
        raise NoReward(f"{subject} returned None, so the episode is unscored")
    if not isinstance(value, Reward):
        return Reward(as_finite(value, subject))
    step_rewards = list(value.steps)
    if step_rewards and len(step_rewards) == sum(not turn.summary for turn in turns):
        remaining_rewards = iter(step_rewards)
        step_rewards = [0.0 if turn.summary else next(remaining_rewards) for turn in turns]
    if step_rewards and len(step_rewards) != len(turns):
        raise Unscored(f"{subject} returned {len(value.steps)} step rewards for {len(turns)} turns")
    return Reward(
        as_finite(value.outcome, subject, "as outcome"),
        [as_finite(step, subject, f"for turn {turn}") for turn, step in enumerate(step_rewards)],
        {key: as_finite(number, subject, f"as part {key}") for key, number in value.parts.items()},
    )


def as_finite(value: Any, subject: str, field: str = "") -> float:
    """Return a number of any library as a float; raise Unscored if it is not finite. `field` names a reward's part."""
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # such as an array of several numbers
        number = math.nan
    if not math.isfinite(number):
        raise Unscored(
            f"{subject} returned {short_repr(value)} {field}".rstrip() + "; it must return a finite number"
        )
    return number


def short_repr(value: Any) -> str:
    """Return a value's repr, truncated to 60 characters, with its type, for error texts."""
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


async def call_function(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call the function: on the event loop if it is async or has `runs_inline`, else in a thread, as it may block."""
    if getattr(function, "runs_inline", None) is True:
        return function(*args, **keywords)
    routine = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(routine):
        return await function(*args, **keywords)
    result = await in_thread(function, *args, **keywords)
    return await result if inspect.isawaitable(result) else result


async def score_single(reward: GroupReward, episode: Episode) -> Reward:
    """Score one episode as a group of one; raise Unscored if the reward compares episodes."""
    if reward.compares:
        raise Unscored(
            "this reward compares the episodes of a group and cannot score a single episode; use it as the run's only "
            "reward, or as a part of Combined"
        )
    [result] = await reward.group([episode])
    if isinstance(result, Exception):
        raise result
    return result


async def score_independently(
    reward: Callable[[Episode], Any], episodes: Sequence[Episode]
) -> list[Reward | Exception]:
    """Score the episodes of a group concurrently and independently, with a reward that takes one episode."""
    results: list[Any] = await asyncio.gather(*map(reward, episodes), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
    return results


def as_group_reward(reward: Any) -> GroupReward | None:
    """Return the reward as a GroupReward; None if it does not score whole groups."""
    if reward is None:
        return None
    adapted_reward = reward if isinstance(reward, GroupReward) else as_reward(reward)
    return adapted_reward if adapted_reward.grouped else None


def compares_episodes(reward: Any) -> bool:
    """Return whether the reward compares the episodes of a group."""
    group_reward = as_group_reward(reward)
    return group_reward is not None and group_reward.compares


async def environment_reward(episode: Episode) -> Reward:
    """Return the reward of the environment's own `reward` method, for use as a part of other rewards."""
    reward_method = getattr(episode.environment, "reward", None)
    if reward_method is None:
        raise Unscored(f"{type(episode.environment).__name__} has no reward method; set reward.type")
    return await AdaptedReward(reward_method, "environment", "episode")(episode)
