"""The `reward` section as the object that scores episodes. Everything that is wrong with it is a ValueError that names
the key."""

from __future__ import annotations

import dataclasses
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
from TrainingFactory.rewards.adapt import Adapted
from TrainingFactory.rewards.checks import check_choice
from TrainingFactory.rewards.combined import ENVIRONMENT, Combined
from TrainingFactory.rewards.judge_base import Judge
from TrainingFactory.rewards.model_judge import SINGLE_VERDICTS, model_judge
from TrainingFactory.rewards.process_reward import ProcessReward
from TrainingFactory.rewards.process_rules import PROCESS_RULES
from TrainingFactory.rewards.rule_based import RULES, rule_from_options
from TrainingFactory.rewards.tool_verified import VERIFIERS, make_verifier
from TrainingFactory.services.runs import RunFolder, is_run
from TrainingFactory.tools.making import call_with

# What only some types read. A value elsewhere would do nothing, so it is refused.
READ_BY = {
    "model": ("learned", "model_judge"),
    "options": ("rule_based", "process_reward", "model_judge", "tool_verified"),
    "outcome_weight": ("process_reward",),
    "step_rewards": ("process_reward",),
}


def check_reward(config: TrainingConfig) -> None:
    """Raises what `make_reward` would, without loading a model."""
    with ExitStack() as held:
        make_reward(config, held, load=False)


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
    if isinstance(reward, Judge):
        return reward.figures
    inner: list[Any] = []
    if isinstance(reward, Adapted):
        inner = [reward.function]
    elif isinstance(reward, Combined):
        inner = list(reward.rewards.values())
    elif isinstance(reward, ProcessReward):
        inner = [reward.outcome]
    total: dict[str, float] = {}
    for figures in map(judge_figures, inner):
        total |= {name: total.get(name, 0.0) + value for name, value in figures.items()}
    return total


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
            return _rule(reward.options, f"{where}.options")
        if reward.type == "tool_verified":
            return _verifier(reward.options, f"{where}.options")
        if reward.type == "process_reward":
            return _process(reward, where)
        if reward.type == "model_judge":
            return self._judge(reward, where)
        return self._learned(reward, where)

    def _judge(self, reward: OneReward, where: str) -> RewardFunction:
        options = dict(reward.options)
        check_choice(f"{where}.options.verdict", options.get("verdict", "score"), SINGLE_VERDICTS)
        if reward.model is not None:
            options["model"] = reward.model
        with _named(f"{where}.options"):
            judge = call_with(model_judge, options, "a model judge")
        self.held.callback(judge.close)
        return judge

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
