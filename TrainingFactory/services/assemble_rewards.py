"""The `reward` section as the object that scores episodes. Everything that is wrong with it is a ValueError that names
the key."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import ConfigError, explain
from TrainingFactory.config.schema import OneReward, RewardPart
from TrainingFactory.protocols import RewardFunction
from TrainingFactory.rewards import LearnedReward
from TrainingFactory.rewards.adapt import Adapted, as_reward, compares
from TrainingFactory.rewards.checks import check_choice, check_number
from TrainingFactory.rewards.combined import ENVIRONMENT, Combined
from TrainingFactory.rewards.distributed import DistributedRewardModel
from TrainingFactory.rewards.judge_base import Judge
from TrainingFactory.rewards.judge_groups import RankingJudge
from TrainingFactory.rewards.judge_verdicts import MAX_CANDIDATES
from TrainingFactory.rewards.model_judge import VERDICTS, model_judge
from TrainingFactory.rewards.pool_judges import judges_at
from TrainingFactory.rewards.process_reward import ProcessReward
from TrainingFactory.rewards.process_rules import PROCESS_RULES
from TrainingFactory.rewards.processes import RewardProcess
from TrainingFactory.rewards.rule_based import RULES, rule_from_options
from TrainingFactory.rewards.rules_base import OnlyIf
from TrainingFactory.rewards.rules_tools import ToolRule
from TrainingFactory.rewards.targets import load_target
from TrainingFactory.rewards.tool_verified import VERIFIERS, make_verifier
from TrainingFactory.services.runs import RunFolder, is_run
from TrainingFactory.tools.making import call_with

# What only some types read. A value elsewhere would do nothing, so it is refused.
READ_BY = {
    "model": ("learned", "model_judge"),
    "options": ("rule_based", "process_reward", "model_judge", "tool_verified", "function"),
    "outcome_weight": ("process_reward",),
    "step_rewards": ("process_reward",),
}


RULE_MAKER = "TrainingFactory.rewards.rule_based:rule_from_options"
MOST_WORKERS = 4  # by default
MANY = 1000  # calls of one judge at a time, which has no limit of its own


def check_reward(config: TrainingConfig, group_size: int | None = None) -> RewardFunction | None:
    """Raises what `make_reward` would, without loading a model; also if groups of that size cannot be scored. What it
    gives is closed again."""
    with ExitStack() as held:
        reward = make_reward(config, held, load=False)
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


def make_reward(
    config: TrainingConfig, held: ExitStack | None = None, *, load: bool = True
) -> RewardFunction | None:
    """Who scores the episodes; None: the environment's own reward. What must be closed goes to `held`. Without `load`
    everything is checked and no reward model is loaded."""
    making, reward = _Making(config, held or ExitStack(), load), config.reward
    if not reward.parts:
        return making.one(reward, "reward")
    if set_too := [key for key in OneReward.model_fields if getattr(reward, key) != _default(key)]:
        raise ValueError(
            f"reward.parts has rewards of its own, and reward.{set_too[0]} is set as well; move it into a part"
        )
    parts: dict[str, tuple[float, Any]] = {}
    for name, entry in reward.parts.items():
        part = _read_part(name, entry)
        made = making.one(part, f"reward.parts.{name}")
        parts[name] = (part.weight, ENVIRONMENT if made is None else made)
    with _named("reward.parts"):
        return Combined(parts, timeout=None)  # the episode's own limit holds


def judge_figures(reward: Any) -> dict[str, float]:
    """What the judges in a reward have asked and spent so far, added up; nothing where there is none."""
    total: dict[str, float] = {}
    for each in {id(found): found for found in _inside(reward)}.values():  # workers may share one
        if isinstance(each, Judge | DistributedRewardModel):
            total |= {name: total.get(name, 0.0) + value for name, value in each.figures.items()}
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
    elif isinstance(reward, OnlyIf):
        inner = [reward.rule, reward.condition]
    for each in inner:
        yield from _inside(each)


@dataclasses.dataclass(slots=True, frozen=True)
class _Making:
    config: TrainingConfig
    held: ExitStack
    load: bool

    def one(self, reward: OneReward, where: str) -> RewardFunction | None:
        for key, types in READ_BY.items():
            if getattr(reward, key) != _default(key) and reward.type not in types:
                raise ValueError(
                    f"{where}.{key} is for {where}.type={' and '.join(types)}; {where}.type is {reward.type}"
                )
        if reward.type == "environment":
            return None
        if reward.type == "rule_based":
            return self._elsewhere(_rule(reward.options, f"{where}.options"), reward.options)
        if reward.type == "function":
            return self._function(reward, f"{where}.options")
        if reward.type == "tool_verified":
            return _verifier(reward.options, f"{where}.options")
        if reward.type == "process_reward":
            return _process(reward, where)
        if reward.type == "model_judge":
            return self._judge(reward, where)
        return self._learned(reward, where)

    def _elsewhere(self, rule: RewardFunction, options: Mapping[str, Any]) -> RewardFunction:
        """A rule in processes, if that is asked for and possible."""
        if not self.config.optimization.distributed_reward or any(
            isinstance(each, ToolRule) for each in _inside(rule)
        ):
            return rule
        return self._processes(RULE_MAKER, as_reward(rule), self._workers, None, dict(options))

    def _function(self, reward: OneReward, where: str) -> RewardFunction:
        with _named(where):
            chosen = call_with(_function_options, reward.options, "a reward of the type function")
            processes = chosen["processes"]
            if processes is None:
                processes = self._workers if self.config.optimization.distributed_reward else 0
            made = as_reward(load_target(chosen["function"]), timeout=chosen["timeout"])
        if not processes:
            return made
        return self._processes(chosen["function"], made, processes, chosen["timeout"], None)

    @property
    def _workers(self) -> int:
        return self.config.optimization.reward_workers or min(MOST_WORKERS, os.cpu_count() or 1)

    def _processes(
        self, target: str, like: Adapted, count: int, timeout: float | None, options: dict[str, Any] | None
    ) -> RewardFunction:
        timeout = timeout or self.config.environment.episode_timeout
        workers = [RewardProcess(target, timeout, options, like) for _ in range(count)]
        for worker in workers:
            self.held.callback(worker.close)
        return DistributedRewardModel(workers)

    def _judge(self, reward: OneReward, where: str) -> RewardFunction:
        # A fence that follows from the seed: the same requests in every run.
        options: dict[str, Any] = {"fence_seed": self.config.training.seed} | reward.options
        check_choice(f"{where}.options.verdict", options.get("verdict", "score"), VERDICTS)
        if reward.model is not None:
            if options.get("model", reward.model) != reward.model:
                raise ValueError(
                    f"{where}.model is {reward.model!r} and {where}.options.model is {options['model']!r}; give one"
                )
            options["model"] = reward.model
        with _named(f"{where}.options"):
            if isinstance(options.get("base_url"), list):
                judges = judges_at(options.pop("base_url"), options, self.held)
                limit = options.get("concurrency", 8) or MANY
                return DistributedRewardModel(
                    judges, per_worker=limit, timeout=self.config.environment.episode_timeout
                )
            judge = call_with(model_judge, options, "a model judge")
        self.held.callback(judge.close)
        return as_reward(judge) if compares(judge) else judge

    def _learned(self, reward: OneReward, where: str) -> RewardFunction | None:
        folder = checkpoint_of(reward, where, self.config.logging.output_dir)
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


def _rule(options: Mapping[str, Any] | str, where: str) -> RewardFunction:
    if isinstance(options, str):
        options = {"rule": options}
    if isinstance(options, Mapping):
        check_choice(f"{where}.rule", options.get("rule", "auto"), RULES)
    with _named(where):
        return rule_from_options(options)


def _verifier(options: Mapping[str, Any], where: str) -> RewardFunction:
    check_choice(f"{where}.verify", options.get("verify"), VERIFIERS)
    with _named(where):
        return make_verifier(**options)


def _process(reward: OneReward, where: str) -> RewardFunction:
    for name in reward.step_rewards:
        check_choice(f"a name in {where}.step_rewards", name, PROCESS_RULES)
    with _named(f"{where}.options"):
        chosen = call_with(_process_options, reward.options, "process_reward")
    outcome = chosen.pop("outcome")
    if isinstance(outcome, Mapping) and "verify" in outcome:
        outcome = _verifier(outcome, f"{where}.options.outcome")
    elif outcome is not None:
        outcome = _rule(outcome, f"{where}.options.outcome")
    with _named(f"{where}.options"):
        return ProcessReward(
            reward.outcome_weight, reward.step_rewards or None, outcome, timeout=None, **chosen
        )


def _process_options(
    pay: str = "once", cap: float | None = None, claw_back: bool = True, outcome: Any = None
) -> dict[str, Any]:
    """Those of ProcessReward that can be written in a config."""
    return {"pay": pay, "cap": cap, "claw_back": claw_back, "outcome": outcome}


def _function_options(
    function: str, timeout: float | None = None, processes: int | None = None
) -> dict[str, Any]:
    if timeout is not None:
        check_number("timeout", timeout)
    if processes is not None and (
        isinstance(processes, bool) or not isinstance(processes, int) or processes < 0
    ):
        raise ValueError(
            f"processes is {processes!r}; it must be a whole number: 0 for none, or so many at a time"
        )
    return {"function": function, "timeout": timeout, "processes": processes}


def _read_part(name: str, entry: Mapping[str, Any]) -> RewardPart:
    try:
        return RewardPart(**entry)
    except ValidationError as error:
        found = explain(error, RewardPart)
    raise ConfigError([dataclasses.replace(each, key=("reward", "parts", name, *each.key)) for each in found])


def checkpoint_of(reward: OneReward, where: str, runs_folder: str) -> Path:
    """The checkpoint of the reward model that is named: the last one of a run, or a folder."""
    wanted = "a run of training.algorithm=reward_model (its name or folder), or a checkpoint of one"
    if reward.model is None:
        raise ValueError(f"{where}.type=learned needs a trained reward model: {where}.model={wanted}")
    from TrainingFactory.learning.reward_models import read_about

    folder = Path(reward.model).expanduser()
    runs = [path for path in (folder, Path(runs_folder).expanduser() / folder) if is_run(path)]
    if runs:
        found = RunFolder(runs[0]).checkpoints()
        if not found:
            raise ValueError(f"{where}.model: run {runs[0]} has no checkpoint yet")
        folder = found[-1]
    elif not folder.is_dir():
        raise ValueError(
            f"{where}.model: there is no {reward.model!r}; it is {wanted}. Names in a registry are not there yet"
        )
    read_about(folder)
    return folder


def reward_model_folder(config: TrainingConfig) -> Path | None:
    """The checkpoint of the reward model that scores alone, if one does."""
    if config.reward.type != "learned" or config.reward.parts:
        return None
    return checkpoint_of(config.reward, "reward", config.logging.output_dir)


def _default(key: str) -> Any:
    return OneReward.model_fields[key].get_default(call_default_factory=True)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Errors in what stands at that key say so."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
