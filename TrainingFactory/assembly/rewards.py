"""The `reward` section as the object that scores episodes. Everything that is wrong with it is told at once, by key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from TrainingFactory.assembly.local_judge import OwnJudge, Say
from TrainingFactory.assembly.reward_types import BESIDE, REWARD_TYPES, Making, reward_model
from TrainingFactory.common.options import OptionError
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import ConfigError, Problem, dotted, explain, option_problems
from TrainingFactory.config.schema import OneReward, RewardPart, RewardSection
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Environment, EnvironmentFactory, RewardFunction
from TrainingFactory.rewards.adapt import Adapted, as_reward, compares, environment_reward
from TrainingFactory.rewards.combined import ENVIRONMENT, Combined
from TrainingFactory.rewards.judge.judges import AsksJudge, Judge, ModelJudge
from TrainingFactory.rewards.process_reward import ProcessReward
from TrainingFactory.rewards.rules.answers import ReferenceRule
from TrainingFactory.rewards.rules.code import ToolRule
from TrainingFactory.rewards.workers.distributed import RewardWorkerPool
from TrainingFactory.rewards.workers.process import RewardProcess
from TrainingFactory.training.preflight import group_too_small
from TrainingFactory.types import Task

Key = tuple[str | int, ...]
INNER: dict[type, Callable[[Any], list[Any]]] = {
    Adapted: lambda reward: [reward.function],
    Combined: lambda reward: list(reward.rewards.values()),
    ProcessReward: lambda reward: [reward.outcome, *filter(None, [reward.pool])],
    RewardWorkerPool: lambda reward: [worker.model for worker in reward.workers],
    RewardProcess: lambda reward: [reward.like],
}
OWN = "the environment's own reward"
# reward.type -> the option that tells one of this type from another
TOLD_BY = {"function": "function", "rule_based": "rule", "tool_verified": "verify"}


def check_reward(config: TrainingConfig) -> RewardFunction | None:
    """Raise what `make_reward` would raise, without loading a model. Return the reward for further checks."""
    return _made(Making(config, load=False))


def make_reward(config: TrainingConfig) -> RewardFunction | None:
    """Return who scores the episodes, to be closed by `close_reward`; None: the environment's own reward."""
    return _made(Making(config, load=True))


def move_object(reward: Any, config: TrainingConfig) -> RewardFunction | None:
    """Return a reward that was handed in, in worker processes if it is a ProcessReward of built-in rules; any other
    object stays as it is."""
    inner = reward.function if isinstance(reward, Adapted) else reward
    if not isinstance(inner, ProcessReward) or inner.rules or not config.optimization.distributed_reward:
        return reward
    return as_reward(Making(config, load=True).spread_steps(inner, {}))


async def open_reward(reward: RewardFunction | None, held: AsyncExitStack, say: Say) -> None:
    """Start the judges of the run's own in a reward, and return when they answer; `held` closes it."""
    held.push_async_callback(close_reward, reward)
    if processes := sum(isinstance(each, RewardProcess) for each in _inside(reward)):
        own = environment_reward in _inside(reward)
        plural = "es" if processes > 1 else ""
        say(f"rewards: {processes} worker process{plural}{f'; {OWN} runs in this process' if own else ''}")
    for each in _inside(reward):
        if isinstance(each, Judge) and isinstance(each.client.model, OwnJudge):
            await each.client.model.open(say)


async def close_reward(reward: RewardFunction | None) -> None:
    """Close the judges and processes in a reward; where it is used again, they open again."""
    for each in _inside(reward):
        if isinstance(each, RewardProcess):
            each.kill()
        elif isinstance(each, Judge):
            await each.close()


def check_group(reward: RewardFunction | None, group_size: int) -> None:
    """Raise if the reward compares the episodes of a group and groups have one episode."""
    if group_size < 2 and compares(reward):
        remedy = "; or use a reward of single episodes, such as a judge whose verdict is score"
        raise group_too_small(group_size, 2, "the reward", remedy)


def check_tasks(
    reward: RewardFunction | None, tasks: Sequence[Task], environment: EnvironmentFactory | None = None
) -> None:
    """Raise if the tasks lack what the reward asks for: a column, or the answers that it or the environment's own
    reward compares with."""
    own = getattr(environment, "reward", None) is ToolEnvironment.reward
    answered = any(task.answer is not None or "expression" in task.metadata for task in tasks)
    for each in _inside(reward):
        if isinstance(each, Adapted):
            each.check_tasks(tasks)
        name = f"rule {each.rule}" if isinstance(each, ReferenceRule) else ""
        if isinstance(each, Judge) and "reference" in each.prompt.fields:
            name = "judge, whose template shows {reference},"
        elif own and each in (None, environment_reward):
            name = "environment's own reward"
        if name and tasks and not answered:
            columns = sorted({"prompt", *(key for task in tasks for key in task.metadata)})
            raise ValueError(
                f"none of the {len(tasks)} tasks has an answer, and the {name} compares with it, so that no episode "
                f'could be scored; give them a column "answer" (they have {", ".join(columns)}) or take another reward'
            )


def check_environment(reward: RewardFunction | None, environment: Environment, task: Task) -> None:
    """Raise if the environment lacks a tool that the reward calls, or writes prompts for a judge that is not there."""
    inside = _inside(reward)
    if isinstance(environment, AsksJudge) and not any(isinstance(each, ModelJudge) for each in inside):
        raise ValueError(
            f"{type(environment).__name__} writes prompts for a judge, and the reward has none: "
            "reward.type=model_judge with its model and options.base_url, alone or in reward.parts"
        )
    for each in inside:
        if isinstance(each, ToolRule):
            each.check_environment(environment, task)


def judge_metrics(reward: Any) -> dict[str, float]:
    """Return what the judges in a reward have asked and spent so far, added up; nothing where there is none."""
    total: dict[str, float] = {}
    for each in _inside(reward):
        if isinstance(each, Judge | RewardWorkerPool):
            total |= {name: total.get(name, 0.0) + value for name, value in each.metrics.items()}
    return total


def reward_model_folder(config: TrainingConfig) -> Path | None:
    """Return the checkpoint of the reward model that scores alone, if one does."""
    if config.reward.type != "learned" or config.reward.parts:
        return None
    return reward_model(config.reward.model, config).folder


def evaluation_reward(
    reward: RewardFunction | None, say: Callable[[str], None] = lambda _: None
) -> RewardFunction | None:
    """Return what a model is measured by: the reward without comparisons within a group, which have the same mean
    however good the model is; the environment's own where nothing else is left."""
    if not compares(reward):
        return reward
    inner: Any = reward.function if isinstance(reward, Adapted) else reward
    rest = inner.without_comparisons() if isinstance(inner, Combined) else None
    by = OWN if rest is None else _parts(rest.rewards)
    say(
        f"note: the reward compares the episodes of a group, which cannot measure progress; evaluation goes by {by}"
    )
    return rest


def scored_by(config: TrainingConfig, measuring: RewardFunction | None) -> str:
    """Say in words whose reward that is; `measuring` is what `evaluation_reward` made of the config's."""
    reward = config.reward
    if isinstance(measuring, Combined):
        return _parts(measuring.rewards)
    if reward.type == "environment" or (measuring is None and reward.type != "learned"):
        return OWN
    name = reward.options.get(TOLD_BY.get(reward.type, "")) or reward.model or reward.judge.get("model")
    return f"reward.type={reward.type}" + (f" ({name})" if name else "")


def _parts(names: Iterable[str]) -> str:
    return f"the parts {', '.join(names)}"


def _inside(reward: Any) -> list[Any]:
    """Return the reward and all that it is made of, each once: workers may share one."""
    found = [reward]
    for each in found:
        inner = next((take(each) for kind, take in INNER.items() if isinstance(each, kind)), [])
        found += [one for one in inner if not any(one is other for other in found)]
    return found


def _made(making: Making) -> RewardFunction | None:
    section, problems = making.config.reward, _Problems()
    key = ("reward",)
    made = (_combined if section.parts else _one)(section, key, making, problems)
    if problems:
        raise making.config.wrong(problems)
    return made


def _combined(section: RewardSection, at: Key, making: Making, problems: _Problems) -> RewardFunction | None:
    for name in OneReward.model_fields:
        if getattr(section, name) != _default(name):
            text = "reward.parts has rewards of its own; leave this out, or move it into a part"
            problems.append(Problem((*at, name), text))
    parts: dict[str, tuple[float, Any]] = {}
    for name, entry in section.parts.items():
        key = (*at, "parts", name)
        try:
            part = RewardPart(**entry)
        except ValidationError as error:
            found = explain(error, RewardPart)
            problems += [dataclasses.replace(each, key=(*key, *each.key)) for each in found]
            continue
        made = _one(part, key, making, problems)
        parts[name] = (part.weight, ENVIRONMENT if made is None else made)
    if problems:
        return None
    with problems.at((*at, "parts")):
        return Combined(parts, timeout=None)  # the episode's own limit holds
    return None


def _one(reward: OneReward, key: Key, making: Making, problems: _Problems) -> RewardFunction | None:
    """Make a reward by its type; what is wrong with it goes to `problems`."""
    options = dict(reward.options)
    for name, types in BESIDE.items():
        value, text = getattr(reward, name), ""
        if value == _default(name):
            continue
        if reward.type not in types:
            text = f"is for {dotted(key)}.type={' or '.join(types)}; {dotted(key)}.type is {reward.type}"
        elif options.setdefault(name, value) != value:
            text = f"is {value!r} and {dotted(key)}.options.{name} is {options[name]!r}; give one"
        if text:
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
