"""The `reward` section as the object that scores episodes. Everything that is wrong with it is told at once, by key."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import ConfigError, Problem, dotted, explain, option_problems
from TrainingFactory.config.schema import OneReward, RewardPart, RewardSection
from TrainingFactory.options import OptionError, did_you_mean, nearest
from TrainingFactory.protocols import Environment, RewardFunction
from TrainingFactory.rewards.adapt import Adapted, compares
from TrainingFactory.rewards.combined import ENVIRONMENT, Combined
from TrainingFactory.rewards.judge.base import Judge
from TrainingFactory.rewards.judge.groups import RankingJudge
from TrainingFactory.rewards.judge.verdicts import MAX_CANDIDATES
from TrainingFactory.rewards.process_reward import ProcessReward
from TrainingFactory.rewards.rule_based import OnlyIf
from TrainingFactory.rewards.rules.code import ToolRule
from TrainingFactory.rewards.workers.distributed import DistributedRewardModel
from TrainingFactory.rewards.workers.process import RewardProcess
from TrainingFactory.services.build.reward_types import BESIDE, REWARD_TYPES, Making, reward_checkpoint
from TrainingFactory.types import Task

Key = tuple[str | int, ...]


def check_reward(config: TrainingConfig, group_size: int | None = None) -> RewardFunction | None:
    """Raise what `make_reward` would, without loading a model; also if groups of that size cannot be scored. Nothing
    is opened: the reward that is returned is for further checks."""
    reward = _made(Making(config, load=False))
    if group_size is not None:
        check_group(reward, group_size)
    return reward


def make_reward(config: TrainingConfig) -> RewardFunction | None:
    """Return who scores the episodes; None: the environment's own reward. What it opens when it is first called is
    closed by `close_reward`. ConfigError with all that is wrong, and where it stands."""
    return _made(Making(config, load=True))


async def close_reward(reward: RewardFunction | None) -> None:
    """Close the judges and processes in a reward; where it is used again, they open again."""
    for each in {id(found): found for found in _inside(reward)}.values():  # workers may share one
        if isinstance(each, RewardProcess):
            each.kill()
        elif isinstance(each, Judge):
            closed: Any = each.close()
            if inspect.isawaitable(closed):
                await closed


def check_group(reward: RewardFunction | None, group_size: int) -> None:
    """Raise if groups of this size cannot be scored."""
    if group_size < 2 and compares(reward):
        raise ValueError(
            f"training.group_size is {group_size}, but the reward compares the episodes of a group with each other: it "
            "needs 2 or more (8 is usual); or take a reward of single episodes, such as a judge whose verdict is score"
        )
    if group_size > MAX_CANDIDATES and any(isinstance(each, RankingJudge) for each in _inside(reward)):
        raise ValueError(
            f"training.group_size is {group_size}, but a judge ranks at most {MAX_CANDIDATES} episodes at once; make "
            "the groups smaller, or take the verdict pairwise with options.opponents"
        )


def check_tasks(reward: RewardFunction | None, tasks: Sequence[Task]) -> None:
    """Raise if the tasks lack what the reward asks for."""
    for each in _inside(reward):
        if isinstance(each, Adapted):
            each.check_tasks(tasks)


def check_environment(reward: RewardFunction | None, environment: Environment, task: Task) -> None:
    """Raise if the environment lacks a tool that the reward calls."""
    for each in _inside(reward):
        if isinstance(each, ToolRule):
            each.check_environment(environment, task)


def judge_metrics(reward: Any) -> dict[str, float]:
    """Return what the judges in a reward have asked and spent so far, added up; nothing where there is none."""
    total: dict[str, float] = {}
    for each in {id(found): found for found in _inside(reward)}.values():  # workers may share one
        if isinstance(each, Judge | DistributedRewardModel):
            found = each.metrics
            total |= {name: total.get(name, 0.0) + value for name, value in found.items()}
    return total


def reward_model_folder(config: TrainingConfig) -> Path | None:
    """Return the checkpoint of the reward model that scores alone, if one does."""
    if config.reward.type != "learned" or config.reward.parts:
        return None
    return reward_checkpoint(config.reward.model, config.logging.output_dir)


def _inside(reward: Any) -> Iterator[Any]:
    """Yield the reward and all that it is made of."""
    yield reward
    inner: list[Any] = []
    if isinstance(reward, Adapted):
        inner = [reward.function]
    elif isinstance(reward, Combined):
        inner = list(reward.rewards.values())
    elif isinstance(reward, ProcessReward):
        inner = [reward.outcome]
    elif isinstance(reward, DistributedRewardModel):
        inner = [worker.model for worker in reward.workers]
    elif isinstance(reward, RewardProcess):
        inner = [reward.like]
    elif isinstance(reward, OnlyIf):
        inner = [reward.rule, reward.condition]
    for each in inner:
        yield from _inside(each)


def _made(making: Making) -> RewardFunction | None:
    section, problems = making.config.reward, _Problems()
    make = _combined if section.parts else _alone
    made = make(section, making, problems)
    if problems:
        raise making.config.wrong(problems)
    return made


def _alone(section: RewardSection, making: Making, problems: _Problems) -> RewardFunction | None:
    return _one(section, ("reward",), making, problems)


def _combined(section: RewardSection, making: Making, problems: _Problems) -> RewardFunction | None:
    written = section.model_fields_set
    # The config of a run has all keys written; so it says nothing there that the type is.
    typed = "type" in written and not OneReward.model_fields.keys() <= written
    for name in OneReward.model_fields:
        if getattr(section, name) != _default(name) or (typed and name == "type"):
            text = "reward.parts has rewards of its own; leave this out, or move it into a part"
            problems.append(Problem(("reward", name), text))
    parts: dict[str, tuple[float, Any]] = {}
    for name, entry in section.parts.items():
        key = ("reward", "parts", name)
        if (part := _part(key, entry, section.parts, problems)) is not None:
            made = _one(part, key, making, problems)
            parts[name] = (part.weight, ENVIRONMENT if made is None else made)
    if problems:
        return None
    with problems.at(("reward", "parts")):
        return Combined(parts, timeout=None)  # the episode's own limit holds
    return None


def _part(
    key: Key, entry: Mapping[str, Any], parts: Mapping[str, Any], problems: _Problems
) -> RewardPart | None:
    try:
        part = RewardPart(**entry)
    except ValidationError as error:
        found = explain(error, RewardPart)
        problems.extend(dataclasses.replace(each, key=(*key, *each.key)) for each in found)
        return None
    if "type" in entry:
        return part
    near = nearest(str(key[-1]), (other for other in parts if other != key[-1]))
    hint = did_you_mean(near and dotted((*key[:-1], near)))
    problems.append(Problem((*key, "type"), f"is missing; each part says which reward it is{hint}"))
    return None


def _one(reward: OneReward, key: Key, making: Making, problems: _Problems) -> RewardFunction | None:
    """Make a reward by its type; what is wrong with it goes to `problems`."""
    options = dict(reward.options)
    for name, types in BESIDE.items():
        value = getattr(reward, name)
        if value == _default(name):
            continue
        if reward.type not in types:
            text = f"is for {dotted(key)}.type={' or '.join(types)}; {dotted(key)}.type is {reward.type}"
            problems.append(Problem((*key, name), text))
        elif options.setdefault(name, value) != value:
            text = f"is {value!r} and {dotted(key)}.options.{name} is {options[name]!r}; give one"
            problems.append(Problem((*key, name), text))
    with problems.at(key, (*key, "options")):
        return REWARD_TYPES[reward.type](making, options)
    return None


def _default(key: str) -> Any:
    return OneReward.model_fields[key].get_default(call_default_factory=True)


class _Problems(list[Problem]):
    """All that is wrong with the section; what is made beside it is of no use."""

    @contextmanager
    def at(self, key: Key, options: Key | None = None) -> Iterator[None]:
        """Note what is raised inside as problems of the section at `key`, whose options are at `options`."""
        try:
            yield
        except ConfigError as error:
            self.extend(error.problems)
        except OptionError as error:
            for problem in option_problems(error, ()):
                beside = problem.key[:1] and problem.key[0] in BESIDE
                place = key if beside else options or key
                self.append(dataclasses.replace(problem, key=(*place, *problem.key)))
        except (ValueError, TypeError) as error:
            self.append(Problem(options or key, str(error)))
