"""What a reward is called with, by its parameters: one episode or trajectory, a group of them, or TRL's columns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from TrainingFactory.openai_form import message_to_dict
from TrainingFactory.protocols import GroupReward
from TrainingFactory.rewards.values import Unscored
from TrainingFactory.types import Task, Trajectory

# "whole" is an object of ours that scores a group by its own method `group`.
Shape = Literal["episode", "trajectory", "episodes", "trajectories", "completions", "whole"]
SINGLE = ("episode", "trajectory")
_NAMES: dict[str, Shape] = {"traj": "trajectory", "trajs": "trajectories"}
_NAMES |= {name: name for name in get_args(Shape) if name != "whole"}
_SEVERAL: dict[str, Shape] = {"Trajectory": "trajectories", "Episode": "episodes"}
_HINT = re.compile(
    r"(?:\w+\.)*(?P<several>(?i:list|tuple|sequence|iterable|collection)\[)?"
    r"(?:\w+\.)*(?P<kind>Trajectory|Episode)(?:, \.\.\.)?\]?"
)


def shape_of(function: Callable[..., Any], name: str) -> Shape:
    """Return what the function takes, by the name or type hint of its first parameter; the episode where neither says
    so. ValueError if it cannot be called with one argument."""
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
    return _by_hint(first.annotation) or _NAMES.get(first.name, "episode")


def _by_hint(hint: Any) -> Shape | None:
    """Read Trajectory, "Trajectory | None", list[types.Trajectory] and the like."""
    text = hint.__qualname__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    text = re.sub(r"^(?:\w+\.)*Optional\[(.*)\]$", r"\1", text.removesuffix("| None").strip())
    found = _HINT.fullmatch(text)
    if found is None:
        return None
    return _SEVERAL[found["kind"]] if found["several"] else _NAMES[found["kind"].lower()]


def columns_for(
    function: Callable[..., Any], trajectories: Sequence[Trajectory], name: str
) -> dict[str, Any]:
    """Return TRL's keywords: completions, prompts and every column of the tasks, each a list with one entry per
    episode. A function without **columns gets those that it names; Unscored if the tasks lack one of them."""
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
    named = {each.name: each for each in parameters if each.kind != each.VAR_KEYWORD}
    missing = sorted(key for key, each in named.items() if each.default is each.empty and key not in columns)
    if missing:
        raise Unscored(
            f"the reward {name} asks for {', '.join(missing)}, which the tasks do not have; "
            f"they have {', '.join(sorted(columns))}"
        )
    takes_all = len(named) < len(parameters)
    return {key: column for key, column in columns.items() if takes_all or key in named}


def _prompt(task: Task) -> str | list[dict[str, Any]]:
    return task.prompt if isinstance(task.prompt, str) else [message_to_dict(one) for one in task.prompt]


def _completion(trajectory: Trajectory) -> str | list[dict[str, Any]]:
    """Write it as TRL does: a text where the prompt is one (the model's answer, nothing that a tool said), else all
    messages that came after the prompt."""
    if isinstance(trajectory.task.prompt, str):
        return trajectory.answer
    return [message_to_dict(each) for turn in trajectory.turns for each in (turn.message, *turn.replies)]


def _sampled(trajectory: Trajectory) -> list[int]:
    return [token for turn in trajectory.turns for token in turn.completion.token_ids]
