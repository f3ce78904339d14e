"""Constructors of every `reward.type`, with typed options. An invalid option raises an OptionError with its name. In
this module `model`, `outcome_weight` and `step_rewards` count as options too."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from TrainingFactory.assembly.local_judge import with_local_judge
from TrainingFactory.cluster.ray_workers import RayWorker
from TrainingFactory.common.options import (
    STRICT,
    InvalidOption,
    OptionError,
    Positive,
    Text,
    ZeroOrMore,
    make_from,
    make_named,
    show_choices,
)
from TrainingFactory.common.workers import Worker
from TrainingFactory.config import TrainingConfig
from TrainingFactory.protocols import RewardFunction
from TrainingFactory.resolve.model_names import ResolvedModel, find_model
from TrainingFactory.rewards import LearnedReward
from TrainingFactory.rewards.adapt import AdaptedReward, as_reward, compares_episodes
from TrainingFactory.rewards.judge.model_judge import make_judges, model_judge
from TrainingFactory.rewards.loading import find_callable, load_reward, with_absolute_path
from TrainingFactory.rewards.process_reward import PROCESS_RULES, ClawBack, ProcessReward
from TrainingFactory.rewards.rules.code import ToolRule
from TrainingFactory.rewards.rules.rule_based import make_rule_from_options
from TrainingFactory.rewards.rules.tool_verified import VERIFIERS, make_rule_or_verifier
from TrainingFactory.rewards.workers.distributed import RewardWorkerPool
from TrainingFactory.rewards.workers.process import RewardProcess

RULE_MAKER = "TrainingFactory.rewards.rules.tool_verified:make_rule_or_verifier"
STEPS_MAKER = "TrainingFactory.rewards.process_reward:make_scorer"
STEP_OPTIONS = ("outcome_weight", "step_rewards", "pay", "cap", "claw_back")
MAX_DEFAULT_WORKERS = 4  # by default
UNLIMITED_REQUESTS = 1000  # concurrent requests of a judge without a limit

Options = dict[str, Any]


@plain_dataclass(slots=True, frozen=True)
class RewardContext:
    """Config and mode in which rewards are made. Without `load`, options are checked, but no reward model is loaded."""

    config: TrainingConfig
    load: bool

    @property
    def num_processes(self) -> int:
        """Return the default number of worker processes of a reward; 0 if distributed rewards are off."""
        optimization = self.config.optimization
        if not optimization.distributed_reward:
            return 0
        return optimization.reward_workers or min(MAX_DEFAULT_WORKERS, os.cpu_count() or 1)

    def make_pool(
        self,
        target: str,
        reward: AdaptedReward,
        num_processes: int,
        timeout: float | None = None,
        options: Any = None,
    ) -> RewardWorkerPool:
        timeout = timeout or self.config.environment.episode_timeout
        worker = partial(RayWorker, role="reward") if self.config.compute.backend == "ray" else Worker
        processes = [RewardProcess(target, timeout, options, reward, worker) for _ in range(num_processes)]
        return RewardWorkerPool(processes)

    def distribute(self, rule: RewardFunction, options: Any) -> RewardFunction:
        """Move a reward rule into worker processes if distributed rewards are on and the rule calls no tools."""
        if not self.num_processes or issubclass(type(rule), ToolRule):
            return rule
        return self.make_pool(RULE_MAKER, as_reward(rule), self.num_processes, options=options)

    def distribute_steps(self, reward: ProcessReward, rules: Mapping[str, str]) -> ProcessReward:
        """Make a process reward score its steps in worker processes if distributed rewards are on. `rules` maps the
        reward's own rules to `FILE.py:FUNCTION`."""
        if not self.num_processes:
            return reward
        options: Options = {name: getattr(reward, name) for name in STEP_OPTIONS}
        options["rules"] = {name: with_absolute_path(rule_path) for name, rule_path in rules.items()}
        adapted_reward = as_reward(reward.score, "process_reward")
        pool = self.make_pool(STEPS_MAKER, adapted_reward, self.num_processes, options=options)
        return replace(reward, pool=pool)


def make_environment_reward(context: RewardContext, options: Options) -> None:
    """Return None for the environment's own reward, which takes no options."""
    if options:
        message = "is an option of another reward type; the environment's own reward takes none"
        raise OptionError(*(InvalidOption(name, message) for name in options))


def make_rule(context: RewardContext, options: Options) -> RewardFunction:
    return context.distribute(make_rule_from_options(options), options)


def make_tool_rule(context: RewardContext, options: Options) -> RewardFunction:
    return context.distribute(make_named(VERIFIERS, options, "verify", "verifier"), options)


@dataclass(config=STRICT, kw_only=True, frozen=True)
class FunctionOptions:
    function: Text
    timeout: Positive = 30.0  # seconds for one call
    processes: ZeroOrMore | None = None


def make_function_reward(context: RewardContext, options: Options) -> RewardFunction:
    function_options = make_from(FunctionOptions, options, "a reward of the type function")
    reward = as_reward(load_reward(function_options.function), timeout=function_options.timeout)
    processes = context.num_processes if function_options.processes is None else function_options.processes
    if not processes:
        return reward
    return context.make_pool(function_options.function, reward, processes, function_options.timeout)


def _make_outcome(options: Any) -> RewardFunction | None:
    return None if options is None else make_rule_or_verifier(options)


@dataclass(config=STRICT, kw_only=True, frozen=True)
class ProcessOptions:
    """The options of ProcessReward that a config can set."""

    rules: dict[str, Text] | None = None
    step_rewards: dict[str, float] = field(default_factory=dict)
    outcome_weight: float = 1.0
    pay: Literal["once", "per_turn"] = "once"
    cap: Annotated[float, Field(ge=0, allow_inf_nan=True)] | None = None
    claw_back: ClawBack = True
    outcome: Annotated[Any, AfterValidator(_make_outcome)] = None

    @field_validator("step_rewards")
    @classmethod
    def _check_step_rewards(cls, step_rewards: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        known_names = {*PROCESS_RULES, *(info.data.get("rules") or ())}
        invalid_options = [
            InvalidOption(name, show_choices(name, known_names))
            for name in step_rewards
            if name not in known_names
        ]
        if invalid_options:
            raise OptionError(*invalid_options)
        return step_rewards


def make_process_reward(context: RewardContext, options: Options) -> RewardFunction:
    settings = make_from(ProcessOptions, options, "process_reward")
    rules = {}
    for name, rule_path in (settings.rules or {}).items():
        try:
            rules[name] = find_callable(rule_path)
        except ValueError as error:
            raise OptionError(InvalidOption(f"rules.{name}", str(error))) from error
    reward = ProcessReward(
        settings.outcome_weight,
        settings.step_rewards or None,
        None if settings.outcome is None else context.distribute(settings.outcome, options["outcome"]),
        pay=settings.pay,
        cap=settings.cap,
        claw_back=settings.claw_back,
        rules=rules,
        timeout=None,  # the episode's own limit holds
    )
    return context.distribute_steps(reward, settings.rules or {})


def make_judge(context: RewardContext, options: Options) -> RewardFunction:
    # The fence depends on the seed, so that the same run sends the same requests.
    options = {"fence_seed": context.config.training.seed} | options
    if "judge" in options:
        options = with_local_judge(options, context.config)
    if isinstance(options.get("base_url"), list):
        judges = make_judges(options.pop("base_url"), options)
        limit = options.get("concurrency", 8) or UNLIMITED_REQUESTS
        return RewardWorkerPool(judges, per_worker=limit, timeout=context.config.environment.episode_timeout)
    reward = make_from(model_judge, options, "a model judge")
    return as_reward(reward) if compares_episodes(reward) else reward


def make_learned_reward(context: RewardContext, options: Options) -> RewardFunction | None:
    model_name = make_from(_parse_learned_options, options, "a reward of the type learned")
    checkpoint = find_reward_model(model_name, context.config)
    if not context.load:
        return None
    from TrainingFactory.learning.reward_models import RewardScorer

    model = context.config.model
    return LearnedReward(
        RewardScorer.load(
            str(checkpoint.folder),
            base=checkpoint.name if checkpoint.adapter else None,
            dtype=model.dtype,
            device=model.device,
            token_budget=context.config.training.token_budget,
            scores_together=not context.config.sampling.deterministic,
            trust_remote_code=model.trust_remote_code,
        )
    )


def _parse_learned_options(model: str | None = None) -> str | None:
    return model


def find_reward_model(model: str | None, config: TrainingConfig) -> ResolvedModel:
    """Find a reward model by name: a run, a checkpoint or a registered model."""
    expectation = (
        "a reward model (training.algorithm=reward_model): a run, a checkpoint, or a registered model"
    )
    if model is None:
        raise OptionError(InvalidOption("model", f"is missing; reward.type=learned needs {expectation}"))
    from TrainingFactory.learning.reward_models import read_reward_model_info

    try:
        checkpoint = find_model(model, config.logging.output_dir, config.registry.path)
    except ValueError as error:
        raise OptionError(InvalidOption("model", f"must be {expectation}; {error}")) from error
    if checkpoint.folder is None:
        raise OptionError(InvalidOption("model", f"must be {expectation}", model))
    read_reward_model_info(checkpoint.folder)
    return checkpoint


REWARD_TYPES: dict[str, Callable[[RewardContext, Options], RewardFunction | None]] = {
    "environment": make_environment_reward,
    "rule_based": make_rule,
    "process_reward": make_process_reward,
    "model_judge": make_judge,
    "tool_verified": make_tool_rule,
    "learned": make_learned_reward,
    "function": make_function_reward,
}
# Keys of the reward section besides `options`, and the types that read them.
SECTION_KEYS = {
    "model": ("learned", "model_judge"),
    "judge": ("model_judge",),
    "outcome_weight": ("process_reward",),
    "step_rewards": ("process_reward",),
}
