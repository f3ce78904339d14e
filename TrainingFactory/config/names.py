"""Aliases of config keys: the short form of a config, and the names that the HelloAgents text uses."""

from __future__ import annotations

import os
from typing import Any

ALIASES = {
    "model_name": "model.name",
    "environment_id": "environment.environment_id",
    "environment.name": "environment.environment_id",
    "reward_function": "reward.type",
    "algorithm": "training.algorithm",
    "num_epochs": "training.num_epochs",
    "num_train_epochs": "training.num_epochs",
    "epochs": "training.num_epochs",
    "max_steps": "training.max_steps",
    "group_size": "training.group_size",
    "batch_size": "training.batch_size",
    "per_device_train_batch_size": "training.batch_size",
    "learning_rate": "training.learning_rate",
    "async_rollout": "optimization.async_rollout",
    "distributed_reward": "optimization.distributed_reward",
    "reward_workers": "optimization.reward_workers",
    "tool_cache": "optimization.tool_cache",
    "async_tools": "environment.async_execution",
    "optimization.async_tools": "environment.async_execution",
    "dataset_id": "data.dataset",
    "data.dataset_id": "data.dataset",
    "data.demonstrations": "data.dataset",
    "use_lora": "lora.enabled",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "output_dir": "logging.output_dir",
    "grpo.importance_cap": "optimization.importance_cap",
    "allocation_id": "compute.allocation_id",
    "registry.register": "registry.checkpoint",
}
# Likely wrong guesses -> the correct keys.
WRONG_GUESSES = {
    "reward.function": "reward.type=function and reward.options.function=FILE.py:NAME",
    "reward.rule": "reward.type=rule_based and reward.options.rule=NAME",
    "reward.verify": "reward.type=tool_verified and reward.options.verify=NAME",
    "reward.base_url": "reward.type=model_judge and reward.options.base_url=URL",
}
# Key that a plain string instead of a section sets: `model: qwen3-4b` is `model: {name: qwen3-4b}`.
SHORT_KEYS = {"model": "name", "environment": "environment_id", "reward": "type"}


def expand_key(key: str) -> str:
    """Resolve an alias: `environment_id` and `environment` are `environment.environment_id`."""
    return f"{key}.{SHORT_KEYS[key]}" if key in SHORT_KEYS else ALIASES.get(key, key)


def expand(raw_config: dict[Any, Any]) -> dict[str, Any]:
    """Return the full form of a config. An alias whose key is also set stays, so that the schema rejects it."""
    # YAML reads an empty section (all its lines commented out) as null: use its defaults.
    raw_config = {str(key): value for key, value in raw_config.items() if value is not None}
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in raw_config.items()}
    for section, key in SHORT_KEYS.items():
        if isinstance(config.get(section), str | os.PathLike):
            config[section] = {key: config[section]}
    if isinstance(config.get("tools"), list):
        config["tools"] = [{"name": tool} if isinstance(tool, str) else tool for tool in config["tools"]]
    for alias, key in ALIASES.items():
        *parents, alias_name = alias.split(".")
        container = config.get(parents[0]) if parents else config
        section, option_name = key.split(".")
        target_section = config.get(section, {})
        if (
            isinstance(container, dict)
            and alias_name in container
            and isinstance(target_section, dict)
            and option_name not in target_section
        ):
            target_section[option_name] = container.pop(alias_name)
            config[section] = target_section
    return config
