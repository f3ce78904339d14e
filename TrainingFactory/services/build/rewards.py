"""The `reward` section as the object that scores episodes. Everything that is wrong with it is a ValueError that names
the key."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import ConfigError, Problem, dotted, explain, nearest
from TrainingFactory.config.schema import OneReward, RewardPart, RewardSection
from TrainingFactory.options import OptionError, Wrong, make_from
from TrainingFactory.protocols import Environment, RewardFunction
from TrainingFactory.rewards import LearnedReward
from TrainingFactory.rewards.adapt import Adapted, as_reward, compares
from TrainingFactory.rewards.checks import check_choice, check_seconds
from TrainingFactory.rewards.combined import ENVIRONMENT, Combined
from TrainingFactory.rewards.judge.base import Judge
from TrainingFactory.rewards.judge.groups import RankingJudge
from TrainingFactory.rewards.judge.pool import judges_at
from TrainingFactory.rewards.judge.verdicts import MAX_CANDIDATES
from TrainingFactory.rewards.loading import find_callable, load_reward
from TrainingFactory.rewards.model_judge import VERDICTS, model_judge
from TrainingFactory.rewards.process_reward import ProcessReward
from TrainingFactory.rewards.process_rules import PROCESS_RULES
from TrainingFactory.rewards.rule_based import rule_from_options
from TrainingFactory.rewards.rules.base import OnlyIf
from TrainingFactory.rewards.rules.code import ToolRule
from TrainingFactory.rewards.tool_verified import VERIFIERS, make_verifier
from TrainingFactory.rewards.workers.distributed import DistributedRewardModel
from TrainingFactory.rewards.workers.process import RewardProcess
from TrainingFactory.services.runs.folder import RunFolder, is_run
from TrainingFactory.tools.builtin.making import OptionError as ToolOptionError
from TrainingFactory.tools.builtin.making import call_with
from TrainingFactory.types import Task

Key = tuple[str | int, ...]
# What only some types read. A value elsewhere would do nothing, so it is refused.
READ_BY = {
    "model": ("learned", "model_judge"),
    "options": ("rule_based", "process_reward", "model_judge", "tool_verified", "function"),
    "outcome_weight": ("process_reward",),
    "step_rewards": ("process_reward",),
}


RULE_MAKER = "TrainingFactory.rewards.rule_based:rule_from_options"
MOST_WORKERS = 4  # by default
FUNCTION_SECONDS = 30.0  # for one call of a function
MANY = 1000  # calls of one judge at a time, which has no limit of its own


def check_reward(config: TrainingConfig, group_size: int | None = None) -> RewardFunction | None:
    """Raises what `make_reward` would, without loading a model; also if groups of that size cannot be scored.
    Nothing is opened."""
    reward = make_reward(config, load=False)
    if group_size is not None:
        check_group(reward, group_size)
    return reward


def check_group(reward: RewardFunction | None, group_size: int) -> None:
    """Whether groups of this size can be scored."""
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
    """Whether the tasks have what the reward asks for."""
    for each in _inside(reward):
        if isinstance(each, Adapted):
            each.check_tasks(tasks)


def check_environment(reward: RewardFunction | None, environment: Environment, task: Task) -> None:
    """Whether the environment has the tools that the reward calls."""
    for each in _inside(reward):
        if isinstance(each, ToolRule):
            each.check_environment(environment, task)


def make_reward(
    config: TrainingConfig, held: AsyncExitStack | None = None, *, load: bool = True
) -> RewardFunction | None:
    """Who scores the episodes; None: the environment's own reward. What must be closed goes to `held`. Without `load`
    everything is checked and no reward model is loaded. ConfigError with all that is wrong, and where it stands."""
    making, reward = _Making(config, held or AsyncExitStack(), load, []), config.reward
    made = making.parts(reward) if reward.parts else making.one(reward, ("reward",))
    if making.problems:
        raise config.wrong(making.problems)
    return made


def judge_figures(reward: Any) -> dict[str, float]:
    """What the judges in a reward have asked and spent so far, added up; nothing where there is none."""
    total: dict[str, float] = {}
    for each in {id(found): found for found in _inside(reward)}.values():  # workers may share one
        if isinstance(each, Judge | DistributedRewardModel):
            found = each.metrics
            total |= {name: total.get(name, 0.0) + value for name, value in found.items()}
    return total


def _inside(reward: Any) -> Iterator[Any]:
    """The reward and all that it is made of."""
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


@dataclasses.dataclass(slots=True, frozen=True)
class _Making:
    config: TrainingConfig
    held: AsyncExitStack
    load: bool
    problems: list[Problem]  # all that is wrong; what is made beside them is of no use

    def parts(self, reward: RewardSection) -> RewardFunction | None:
        written = reward.model_fields_set
        # The config of a run has all keys written; so it says nothing there that the type is.
        typed = "type" in written and not OneReward.model_fields.keys() <= written
        for name in OneReward.model_fields:
            if getattr(reward, name) != _default(name) or (typed and name == "type"):
                text = "reward.parts has rewards of its own; leave this out, or move it into a part"
                self.problems.append(Problem(("reward", name), text))
        parts: dict[str, tuple[float, Any]] = {}
        for name, entry in reward.parts.items():
            key = ("reward", "parts", name)
            if (part := self._part(key, entry)) is not None:
                made = self.one(part, key)
                parts[name] = (part.weight, ENVIRONMENT if made is None else made)
        if self.problems:
            return None
        with self._noting(("reward", "parts")):
            return Combined(parts, timeout=None)  # the episode's own limit holds

    def _part(self, key: Key, entry: Mapping[str, Any]) -> RewardPart | None:
        try:
            part = RewardPart(**entry)
        except ValidationError as error:
            found = explain(error, RewardPart)
            self.problems.extend(dataclasses.replace(each, key=(*key, *each.key)) for each in found)
            return None
        if "type" in entry:
            return part
        name = str(key[-1])
        near = nearest(name, (other for other in self.config.reward.parts if other != name))
        hint = f"; did you mean {dotted((*key[:-1], near))}?" if near else ""
        self.problems.append(Problem((*key, "type"), f"is missing; each part says which reward it is{hint}"))
        return None

    def one(self, reward: OneReward, key: Key) -> RewardFunction | None:
        for name, types in READ_BY.items():
            if getattr(reward, name) != _default(name) and reward.type not in types:
                text = f"is for {dotted(key)}.type={' or '.join(types)}; {dotted(key)}.type is {reward.type}"
                self.problems.append(Problem((*key, name), text))
        with self._noting((*key, "options"), reward.options):
            return self._made(reward, key)

    def _made(self, reward: OneReward, key: Key) -> RewardFunction | None:
        if reward.type == "environment":
            return None
        if reward.type == "rule_based":
            return self._elsewhere(rule_from_options(reward.options), reward.options)
        if reward.type == "function":
            return self._function(reward)
        if reward.type == "tool_verified":
            return _verifier(reward.options)
        if reward.type == "process_reward":
            return self._process(reward, key)
        if reward.type == "model_judge":
            return self._judge(reward, key)
        return self._learned(reward, key)

    @contextmanager
    def _noting(self, key: Key, options: Mapping[str, Any] | None = None) -> Iterator[None]:
        """What is wrong with the options at that key becomes problems of the config."""
        try:
            yield
        except ConfigError as error:
            self.problems.extend(error.problems)
        except (OptionError, ToolOptionError) as error:
            self.problems.extend(_problem(key, wrong, options or {}) for wrong in error.wrong)
        except (ValueError, TypeError) as error:
            self.problems.append(Problem(key, str(error)))

    def _elsewhere(self, rule: RewardFunction, options: Mapping[str, Any]) -> RewardFunction:
        """A rule in processes, if that is asked for and possible."""
        if not self.config.optimization.distributed_reward or any(
            isinstance(each, ToolRule) for each in _inside(rule)
        ):
            return rule
        return self._processes(RULE_MAKER, as_reward(rule), self._workers, None, dict(options))

    def _function(self, reward: OneReward) -> RewardFunction:
        chosen = call_with(_function_options, reward.options, "a reward of the type function")
        processes = chosen["processes"]
        if processes is None:
            processes = self._workers if self.config.optimization.distributed_reward else 0
        made = as_reward(load_reward(chosen["function"]), timeout=chosen["timeout"])
        if not processes:
            return made
        return self._processes(chosen["function"], made, processes, chosen["timeout"], None)

    def _process(self, reward: OneReward, key: Key) -> RewardFunction | None:
        chosen = call_with(_process_options, reward.options, "process_reward")
        outcome, before = chosen.pop("outcome"), len(self.problems)
        for name, target in chosen["rules"].items():
            with self._noting((*key, "options", "rules", name)):
                chosen["rules"][name] = find_callable(target)
        for name in reward.step_rewards:
            with self._noting((*key, "step_rewards"), reward.step_rewards):
                check_choice(name, name, PROCESS_RULES | chosen["rules"])
        if outcome is not None:
            inner = outcome if isinstance(outcome, Mapping) else {}
            with self._noting((*key, "options", "outcome"), inner):
                outcome = _verifier(inner) if "verify" in inner else rule_from_options(outcome)
        if len(self.problems) > before:
            return None
        chosen |= {"outcome_weight": reward.outcome_weight, "outcome": outcome, "timeout": None}
        chosen["step_rewards"] = reward.step_rewards or None
        return make_from(ProcessReward, chosen, "process_reward")

    @property
    def _workers(self) -> int:
        return self.config.optimization.reward_workers or min(MOST_WORKERS, os.cpu_count() or 1)

    def _processes(
        self, target: str, like: Adapted, count: int, timeout: float | None, options: dict[str, Any] | None
    ) -> RewardFunction:
        timeout = timeout or self.config.environment.episode_timeout
        workers = [RewardProcess(target, timeout, options, like) for _ in range(count)]
        for worker in workers:
            self.held.callback(worker.kill)
        return DistributedRewardModel(workers)

    def _judge(self, reward: OneReward, key: Key) -> RewardFunction:
        # A fence that follows from the seed: the same requests in every run.
        options: dict[str, Any] = {"fence_seed": self.config.training.seed} | reward.options
        check_choice("verdict", options.get("verdict", "score"), VERDICTS)
        if reward.model is not None:
            if options.get("model", reward.model) != reward.model:
                text = (
                    f"is {reward.model!r} and {dotted(key)}.options.model is {options['model']!r}; give one"
                )
                raise ConfigError([Problem((*key, "model"), text)])
            options["model"] = reward.model
        if isinstance(options.get("base_url"), list):
            judges = judges_at(options.pop("base_url"), options)
            for judge in dict.fromkeys(judges):
                self.held.push_async_callback(judge.close)
            limit = options.get("concurrency", 8) or MANY
            return DistributedRewardModel(
                judges, per_worker=limit, timeout=self.config.environment.episode_timeout
            )
        judge = call_with(model_judge, options, "a model judge")
        self.held.push_async_callback(judge.close)
        return as_reward(judge) if compares(judge) else judge

    def _learned(self, reward: OneReward, key: Key) -> RewardFunction | None:
        folder = reward_checkpoint(reward, dotted(key), self.config.logging.output_dir)
        if not self.load:
            return None
        from TrainingFactory.learning.reward_models import RewardScorer

        model = self.config.model
        return LearnedReward(
            RewardScorer.load(
                folder,
                dtype=model.dtype,
                device=model.device,
                token_budget=self.config.training.token_budget,
                together=not self.config.sampling.deterministic,
                trust_remote_code=model.trust_remote_code,
            )
        )


def _verifier(options: Mapping[str, Any]) -> RewardFunction:
    check_choice("verify", options.get("verify"), VERIFIERS)
    return make_verifier(**options)


def _problem(key: Key, wrong: Any, options: Mapping[str, Any]) -> Problem:
    """By the option's own key, where it is one of the options or should be; else its name is part of the text."""
    inner = wrong.option.split(".")
    if not inner[0].isidentifier():
        return Problem(key, f"{wrong.option} {wrong.text}".strip(), wrong.value)
    if wrong.value is ... or inner[0] in options:
        return Problem((*key, *inner), wrong.text, wrong.value)
    return Problem((*key, *inner), f"is missing; it {wrong.text}")


def _process_options(
    pay: str = "once",
    cap: float | None = None,
    claw_back: bool = True,
    outcome: Any = None,
    rules: Any = None,
) -> dict[str, Any]:
    """Those of ProcessReward that can be written in a config."""
    if rules is not None and not isinstance(rules, Mapping):
        text = "must be names with their functions, such as {asks_first: rules.py:asks_first}"
        raise OptionError(Wrong("rules", text, rules))
    return {"pay": pay, "cap": cap, "claw_back": claw_back, "outcome": outcome, "rules": dict(rules or {})}


def _function_options(
    function: str, timeout: float = FUNCTION_SECONDS, processes: int | None = None
) -> dict[str, Any]:
    check_seconds("timeout", timeout)
    if processes is not None and (
        isinstance(processes, bool) or not isinstance(processes, int) or processes < 0
    ):
        text = "must be a whole number: 0 for none, or so many at a time"
        raise OptionError(Wrong("processes", text, processes))
    return {"function": function, "timeout": timeout, "processes": processes}


def reward_checkpoint(reward: OneReward, where: str, runs_folder: str) -> Path:
    """The checkpoint of the reward model that is named: the last one of a run, or a folder."""
    named = (*where.split("."), "model")
    wanted = "a run of training.algorithm=reward_model (its name or folder), or a checkpoint of one"
    if reward.model is None:
        text = f"is missing; {where}.type=learned needs a trained reward model: {wanted}"
        raise ConfigError([Problem(named, text)])
    from TrainingFactory.learning.reward_models import read_about

    folder = Path(reward.model).expanduser()
    runs = [path for path in (folder, Path(runs_folder).expanduser() / folder) if is_run(path)]
    if runs:
        found = RunFolder(runs[0]).checkpoints()
        if not found:
            raise ConfigError([Problem(named, f"run {runs[0]} has no checkpoint yet")])
        folder = found[-1]
    elif not folder.is_dir():
        text = f"there is no {reward.model!r}; it is {wanted}. Names in a registry are not there yet"
        raise ConfigError([Problem(named, text)])
    read_about(folder)
    return folder


def reward_model_folder(config: TrainingConfig) -> Path | None:
    """The checkpoint of the reward model that scores alone, if one does."""
    if config.reward.type != "learned" or config.reward.parts:
        return None
    return reward_checkpoint(config.reward, "reward", config.logging.output_dir)


def _default(key: str) -> Any:
    return OneReward.model_fields[key].get_default(call_default_factory=True)
