"""Branching (forked episodes) of a config: checks before a run, and the settings of the rollout engine."""

from __future__ import annotations

from typing import Any

from TrainingFactory.common.user_code import load_objects, split_name
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.rollout.branching import Branching


def make_branching(config: TrainingConfig) -> Branching | None:
    """Return the rollout engine's branching settings, with the user's `function` imported; None without branching."""
    branching = config.training.branching
    if branching is None:
        return None
    options: dict[str, Any] = branching.model_dump() | {"function": _load_function(config)}
    return Branching(**options, in_waves=config.sampling.deterministic)


def _load_function(config: TrainingConfig) -> Any:
    section = config.training.branching
    if section is None or section.at != "function" or section.function is None:
        return None
    target = section.function
    key = ("training", "branching", "function")
    if not split_name(target)[1]:
        raise config.wrong([Problem(key, "name a function of the file, as in forks.py:uncertain", target)])
    try:
        _, _, [function] = load_objects("training.branching.function", target)
    except ValueError as error:
        raise config.wrong([Problem(key, str(error))]) from error
    if not callable(function):
        raise config.wrong([Problem(key, "is not a function", target)])
    return function


def count_max_leaves(config: TrainingConfig) -> int:
    """Return the maximum number of episodes per task: the group, including all forked episodes."""
    group_size, section = config.training.group_size, config.training.branching
    if section is None:
        return group_size
    num_leaves = group_size * section.continuations**section.max_forks
    return num_leaves if section.max_episodes is None else min(num_leaves, section.max_episodes)
