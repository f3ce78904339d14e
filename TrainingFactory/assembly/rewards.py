"""The reward function of a config's `reward` section. All invalid keys and values are reported together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from TrainingFactory.assembly.local_judge import LocalJudge, Notify
from TrainingFactory.assembly.reward_types import REWARD_TYPES, SECTION_KEYS, RewardContext, find_reward_model
from TrainingFactory.common.options import OptionError
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import ConfigError, Problem, dotted, list_option_problems, list_problems
from TrainingFactory.config.schema import RewardPart, RewardSection, SingleRewardSection
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import Environment, EnvironmentFactory, RewardFunction
from TrainingFactory.rewards.adapt import AdaptedReward, as_reward, compares_episodes, environment_reward
from TrainingFactory.rewards.combined import ENVIRONMENT_PART, Combined
from TrainingFactory.rewards.judge.judges import Judge, JudgePromptEnvironment, ModelJudge
from TrainingFactory.rewards.process_reward import ProcessReward
from TrainingFactory.rewards.rules.answers import ReferenceRule
from TrainingFactory.rewards.rules.code import ToolRule
from TrainingFactory.rewards.workers.distributed import RewardWorkerPool
from TrainingFactory.rewards.workers.process import RewardProcess
from TrainingFactory.training.preflight import group_size_error
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.types import Task

Key = tuple[str | int, ...]
PART_LISTERS: dict[type, Callable[[Any], list[Any]]] = {
    AdaptedReward: lambda reward: [reward.function],
    Combined: lambda reward: list(reward.rewards.values()),
    ProcessReward: lambda reward: [reward.outcome, *filter(None, [reward.pool])],
    RewardWorkerPool: lambda reward: [worker.model for worker in reward.workers],
    RewardProcess: lambda reward: [reward.adapted_reward],
}
OWN_REWARD_TEXT = "the environment's own reward"
# reward.type -> the option that identifies a reward of this type
NAME_OPTIONS = {"function": "function", "rule_based": "rule", "tool_verified": "verify"}


def check_reward(config: TrainingConfig) -> RewardFunction | None:
    """Check the reward section without loading a model, with the errors of `make_reward`; return the reward for further
    checks."""
    return _make_reward(RewardContext(config, load=False))


def make_reward(config: TrainingConfig) -> RewardFunction | None:
    """Return the reward function, to be closed by `close_reward`; None: the environment's own reward."""
    return _make_reward(RewardContext(config, load=True))


def move_to_workers(reward: Any, config: TrainingConfig) -> RewardFunction | None:
    """Move a caller's ProcessReward of built-in rules into worker processes if optimization.distributed_reward is set;
    return any other reward unchanged."""
    scorer = reward.function if isinstance(reward, AdaptedReward) else reward
    if not isinstance(scorer, ProcessReward) or scorer.rules or not config.optimization.distributed_reward:
        return reward
    return as_reward(RewardContext(config, load=True).distribute_steps(scorer, {}))


async def open_reward(reward: RewardFunction | None, exit_stack: AsyncExitStack, notify: Notify) -> None:
    """Start the judges that the run serves itself, and wait until they answer; `exit_stack` closes the reward."""
    exit_stack.push_async_callback(close_reward, reward)
    parts = _list_parts(reward)
    if num_processes := sum(isinstance(part, RewardProcess) for part in parts):
        plural_suffix = "es" if num_processes > 1 else ""
        inline_note = f"; {OWN_REWARD_TEXT} runs in this process" if environment_reward in parts else ""
        notify(f"rewards: {num_processes} worker process{plural_suffix}{inline_note}")
    for part in parts:
        if isinstance(part, Judge) and isinstance(part.client.model, LocalJudge):
            await part.client.model.open(notify)


async def close_reward(reward: RewardFunction | None) -> None:
    """Close the judges and processes of a reward; the next use opens them again."""
    for part in _list_parts(reward):
        if isinstance(part, RewardProcess):
            part.kill()
        elif isinstance(part, Judge):
            await part.close()


def check_group_size(reward: RewardFunction | None, group_size: int) -> None:
    """Raise if the reward compares the episodes of a group and groups have one episode."""
    if group_size < 2 and compares_episodes(reward):
        remedy = "; or use a reward of single episodes, such as a judge whose verdict is score"
        raise group_size_error(group_size, 2, "the reward", remedy)


def check_tasks(
    reward: RewardFunction | None, tasks: Sequence[Task], environment: EnvironmentFactory | None = None
) -> None:
    """Raise if the tasks lack a column that the reward reads, or lack the answers to which the reward or the
    environment's own reward compares."""
    compares_answers = getattr(environment, "reward", None) is ToolEnvironment.reward
    has_answers = any(task.answer is not None or "expression" in task.metadata for task in tasks)
    for part in _list_parts(reward):
        if isinstance(part, AdaptedReward):
            part.check_tasks(tasks)
        scorer = f"rule {part.rule}" if isinstance(part, ReferenceRule) else ""
        if isinstance(part, Judge) and "reference" in part.prompt.fields:
            scorer = "judge, whose template shows {reference},"
        elif compares_answers and part in (None, environment_reward):
            scorer = "environment's own reward"
        if scorer and tasks and not has_answers:
            columns = sorted({"prompt", *(key for task in tasks for key in task.metadata)})
            raise ValueError(
                f"none of the {len(tasks)} tasks has an answer, but the {scorer} compares with it, so no episode could "
                f'be scored; add a column "answer" (the columns are {", ".join(columns)}), or set another reward'
            )


def check_environment(reward: RewardFunction | None, environment: Environment, task: Task) -> None:
    """Raise if the environment lacks a tool that the reward calls, or writes judge prompts although there is no
    judge."""
    parts = _list_parts(reward)
    if isinstance(environment, JudgePromptEnvironment) and not any(
        isinstance(part, ModelJudge) for part in parts
    ):
        raise ValueError(
            f"{type(environment).__name__} writes prompts for a judge, but the reward has none: set "
            "reward.type=model_judge with its model and options.base_url, alone or in reward.parts"
        )
    for part in parts:
        if isinstance(part, ToolRule):
            part.check_environment(environment, task)


def judge_metrics(reward: Any) -> dict[str, float]:
    """Return the summed requests, tokens and costs of all judges of a reward; empty without a judge."""
    totals: dict[str, float] = {}
    for part in _list_parts(reward):
        if isinstance(part, Judge | RewardWorkerPool):
            totals |= {name: totals.get(name, 0.0) + value for name, value in part.metrics.items()}
    return totals


def find_reward_model_folder(config: TrainingConfig) -> Path | None:
    """Return the reward model's checkpoint if it is the only reward, else None."""
    if config.reward.type != "learned" or config.reward.parts:
        return None
    return find_reward_model(config.reward.model, config).folder


def uses_environment_reward(reward: RewardFunction | None) -> bool:
    """Return whether the environment's own reward is the reward or a part of it."""
    inner_reward = reward.reward if isinstance(reward, RewardClock) else reward
    return inner_reward is None or environment_reward in _list_parts(inner_reward)


def uses_only_environment_reward(reward: RewardFunction | None) -> bool:
    """Return whether every part of the reward is the environment's own reward."""
    leaves = [part for part in _list_parts(reward) if not isinstance(part, tuple(PART_LISTERS))]
    return all(leaf is None or leaf is environment_reward for leaf in leaves)


def get_heldout_reward(
    reward: RewardFunction | None, notify: Callable[[str], None] = lambda _: None
) -> RewardFunction | None:
    """Return the reward for evaluation. Parts that compare the episodes of a group are removed, because the mean of
    such a reward does not depend on the model. If no part is left, return None, the environment's own reward."""
    if not compares_episodes(reward):
        return reward
    inner_reward: Any = reward.function if isinstance(reward, AdaptedReward) else reward
    independent_reward = inner_reward.without_comparisons() if isinstance(inner_reward, Combined) else None
    scorer = OWN_REWARD_TEXT if independent_reward is None else _describe_parts(independent_reward.rewards)
    notify(
        f"note: the reward compares the episodes of a group, which cannot measure progress; evaluation uses {scorer}"
    )
    return independent_reward


def name_scorer(config: TrainingConfig, heldout_reward: RewardFunction | None) -> str:
    """Describe the reward of an evaluation. `heldout_reward` is the result of `get_heldout_reward`."""
    reward = config.reward
    if isinstance(heldout_reward, Combined):
        return _describe_parts(heldout_reward.rewards)
    if reward.type == "environment" or (heldout_reward is None and reward.type != "learned"):
        return OWN_REWARD_TEXT
    name = reward.options.get(NAME_OPTIONS.get(reward.type, "")) or reward.model or reward.judge.get("model")
    return f"reward.type={reward.type}" + (f" ({name})" if name else "")


def _describe_parts(names: Iterable[str]) -> str:
    return f"the parts {', '.join(names)}"


def _list_parts(reward: Any) -> list[Any]:
    """Return a reward and all of its nested parts, each once even if several workers share it."""
    parts = [reward]
    for part in parts:
        children = next((lister(part) for kind, lister in PART_LISTERS.items() if isinstance(part, kind)), [])
        parts += [child for child in children if not any(child is member for member in parts)]
    return parts


def _make_reward(context: RewardContext) -> RewardFunction | None:
    section, problems = context.config.reward, _Problems()
    key = ("reward",)
    reward = (_make_combined if section.parts else _make_single)(section, key, context, problems)
    if problems:
        raise context.config.wrong(problems)
    return reward


def _make_combined(
    section: RewardSection, section_key: Key, context: RewardContext, problems: _Problems
) -> RewardFunction | None:
    for name in SingleRewardSection.model_fields:
        if getattr(section, name) != _get_default(name):
            message = "cannot be combined with reward.parts; leave it out, or move it into a part"
            problems.append(Problem((*section_key, name), message))
    parts: dict[str, tuple[float, Any]] = {}
    for name, part_options in section.parts.items():
        key = (*section_key, "parts", name)
        try:
            part = RewardPart(**part_options)
        except ValidationError as error:
            part_problems = list_problems(error, RewardPart)
            problems += [dataclasses.replace(problem, key=(*key, *problem.key)) for problem in part_problems]
            continue
        reward = _make_single(part, key, context, problems)
        parts[name] = (part.weight, ENVIRONMENT_PART if reward is None else reward)
    if problems:
        return None
    with problems.attribute_to((*section_key, "parts")):
        return Combined(parts, timeout=None)  # the episode's own limit holds
    return None


def _make_single(
    section: SingleRewardSection, key: Key, context: RewardContext, problems: _Problems
) -> RewardFunction | None:
    """Make a reward by its type; add invalid options to `problems`."""
    options = dict(section.options)
    for option, types in SECTION_KEYS.items():
        value, message = getattr(section, option), ""
        if value == _get_default(option):
            continue
        if section.type not in types:
            message = f"is for {dotted(key)}.type={' or '.join(types)}; {dotted(key)}.type is {section.type}"
        elif options.setdefault(option, value) != value:
            message = f"is {value!r} and {dotted(key)}.options.{option} is {options[option]!r}; give one"
        if message:
            problems.append(Problem((*key, option), message))
    with problems.attribute_to(key, (*key, "options")):
        return REWARD_TYPES[section.type](context, options)
    return None


def _get_default(key: str) -> Any:
    return SingleRewardSection.model_fields[key].get_default(call_default_factory=True)


class _Problems(list[Problem]):
    """All problems of the reward section. If there are any, the reward that was made must not be used."""

    @contextmanager
    def attribute_to(self, key: Key, options: Key | None = None) -> Iterator[None]:
        """Collect errors raised inside as problems of the section at `key`, whose options are at `options`."""
        try:
            yield
        except ConfigError as error:
            self.extend(error.problems)
        except OptionError as error:
            for problem in list_option_problems(error, ()):
                is_section_key = problem.key[:1] and problem.key[0] in SECTION_KEYS
                location = key if is_section_key else options or key
                self.append(dataclasses.replace(problem, key=(*location, *problem.key)))
        except (ValueError, TypeError) as error:
            self.append(Problem(options or key, str(error)))
