"""Notices about options that a run ignores; commands and trainers print them."""

from __future__ import annotations

from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.learner import compute_importance_cap
from TrainingFactory.cluster.launcher import find_launched_process
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.not_yet import list_changes, list_unimplemented
from TrainingFactory.rewards.rules.code import ToolRule
from TrainingFactory.rewards.rules.tool_verified import make_rule_or_verifier

ASYNC_KEYS = ("async_rollout", "max_staleness", "async_order")


def list_notices(config: TrainingConfig, *, has_reward: bool = False) -> list[str]:
    """Return one line for each option that is not implemented, or not supported by this reward. `has_reward`: the
    caller's reward replaces the config's."""
    return [*list_unimplemented(config), *_list_process_notices(config, has_reward)]


def list_unused_options(
    config: TrainingConfig, *, has_episodes: bool = False, has_heldout: bool = False
) -> list[str]:
    """Return one line for each group of options that the config sets and training ignores. `has_episodes`: the caller
    passes an environment. `has_heldout`: the caller passes held-out rows."""
    training, name = config.training, config.training.algorithm
    kind = KINDS[name]
    lines = [
        (list_changes(config, other_name), f"options of {other_name}, but this run trains with {name}")
        for other_name in KINDS
        if other_name != name
    ]
    if not kind.samples:
        group_keys = [key for key in list_changes(config, "training") if key == "training.group_size"]
        lines.append((group_keys, f"{name} samples no groups of episodes"))
        environment = config.environment
        has_episodes = (
            has_episodes
            or (environment.environment_id or environment.command) is not None
            or bool(config.tools)
        )
        if not (has_episodes and training.eval_every is not None):
            uses_expert = kind.accepts_demonstrations and config.data.dataset is None
            used_keys = {"sampling.max_reply_tokens"} if uses_expert else set()
            sampling_keys = [key for key in list_changes(config, "sampling") if key not in used_keys]
            if not uses_expert:
                sampling_keys += [
                    key for key in list_changes(config, "environment") if key == "environment.num_workers"
                ]
            lines.append((sampling_keys, f"{name} samples only with an environment and training.eval_every"))
    async_keys = [key for key in list_changes(config, "optimization") if key.split(".")[1] in ASYNC_KEYS]
    if not kind.samples:
        lines.append((async_keys, f"{name} does not train on sampled episodes"))
    elif not config.optimization.async_rollout:
        lines.append((async_keys, "only used with optimization.async_rollout=true"))
    if compute_importance_cap(config) is None:
        option_keys = [
            key for key in list_changes(config, "optimization") if "importance" in key or "mismatch" in key
        ]
        reason = "the learner itself samples, so no correction is applied without optimization.importance_cap"
        lines.append((option_keys, reason if kind.samples else f"{name} does not train on sampled episodes"))
    if config.compute.backend != "ray":
        local_keys = {f"compute.{key}" for key in ("allocation_id", "start_timeout", "learners", "num_gpus")}
        ray_keys = [key for key in list_changes(config, "compute") if key not in local_keys]
        lines.append((ray_keys, "only used with compute.backend=ray"))
        remote_keys = [f"tools.{number}.remote" for number, tool in enumerate(config.tools) if tool.remote]
        lines.append((remote_keys, "without compute.backend=ray tools run in the run's process"))
    if config.compute.learners == 1 or (config.compute.learners is None and find_launched_process() is None):
        offload_keys = [
            key for key in list_changes(config, "optimization") if key == "optimization.offload_reference"
        ]
        lines.append((offload_keys, "only used with several learners (compute.learners)"))
    if training.eval_every is None:
        heldout_keys = [key for key in list_changes(config, "data") if key.startswith("data.heldout")]
        heldout_keys += ["heldout"] if has_heldout else []
        lines.append((heldout_keys, "nothing is evaluated without training.eval_every"))
    if config.model.adapter is not None:
        shape_keys = [key for key in list_changes(config, "lora") if key != "lora.enabled"]
        lines.append((shape_keys, "model.adapter keeps the shape that it was trained with"))
    elif not config.lora.enabled:
        lines.append((list_changes(config, "lora"), "there is no adapter without lora.enabled=true"))
    lines += _list_branching_notices(config)
    return [f"{', '.join(option_keys)}: {text}" for option_keys, text in lines if option_keys]


def _list_branching_notices(config: TrainingConfig) -> list[tuple[list[str], str]]:
    """Return the options of training.branching that have no effect, because they belong to another value of `at`."""
    branching = config.training.branching
    if branching is None:
        return []
    keys = branching.model_dump(exclude_defaults=True).keys() & {"turns", "entropy", "function"}
    return [
        ([f"training.branching.{key}"], f"only used with training.branching.at={key}")
        for key in sorted(keys - {branching.at})
    ]


def _list_process_notices(config: TrainingConfig, has_reward: bool) -> list[str]:
    """Return a line about rewards that cannot run in worker processes although `distributed_reward` is set."""
    optimization, reward = config.optimization, config.reward
    if not optimization.distributed_reward:
        notice = "optimization.reward_workers: only used with optimization.distributed_reward=true"
        return [notice] if optimization.reward_workers is not None else []
    reward_parts = [*reward.parts.values()] or [{"type": reward.type, "options": reward.options}]
    typed_options = [(part.get("type", ""), part.get("options") or {}) for part in reward_parts]
    local_types = [kind for kind, options in typed_options if not _can_run_in_worker(kind, options)]
    if has_reward or not local_types:
        return []
    types = ", ".join(dict.fromkeys(local_types))
    return [
        f"optimization.distributed_reward: rewards of the type {types} stay in the run's process, because they call "
        "an endpoint, or need its tools, models or environments"
    ]


def _can_run_in_worker(reward_type: str, options: Any) -> bool:
    if reward_type not in ("rule_based", "tool_verified"):
        return reward_type in ("function", "process_reward")
    try:
        return not isinstance(make_rule_or_verifier(options), ToolRule)
    except ValueError:
        return True  # reported when the reward is made
