"""Options whose feature is not there yet. Nothing is ignored in silence: commands print these notices."""

from __future__ import annotations

from typing import Any

from TrainingFactory.config.schema import TrainingConfig

# key -> (the value that says what happens now anyway, or several that work, what to tell a user who set another one)
NOT_YET: dict[str, tuple[Any, str]] = {
    "environment.async_execution": (True, "tools always run while other episodes are sampled"),
    "environment.num_workers": (None, "there are always as many tool workers as episodes"),
    "reward.type": (("environment", "learned"), "episodes are scored by the environment's own reward"),
    "reward.outcome_weight": (1.0, "rewards count as they are, with no weights"),
    "reward.step_rewards": ({}, "rewards count as they are, with no weights"),
    "optimization.async_rollout": (False, "training and sampling do not overlap yet"),
    "optimization.distributed_reward": (False, "rewards are computed in this process"),
    "sampling.engine": ("native", "vLLM is not connected yet; the native engine samples"),
    "compute.backend": ("local", "Ray is not connected yet; everything runs on this machine"),
    "compute.num_gpus": (None, "one device is used; choose it with model.device"),
}


def notices(config: TrainingConfig) -> list[str]:
    """One line for each feature that was asked for and is not there yet, with the keys that ask for it."""
    asked: dict[str, list[str]] = {}
    for key, (now, text) in NOT_YET.items():
        holder: Any = config
        *parents, last = key.split(".")
        for part in parents:
            holder = getattr(holder, part)
        fine = now if isinstance(now, tuple) else (now,)
        if last in holder.model_fields_set and getattr(holder, last) not in fine:
            asked.setdefault(text, []).append(key)
    return [f"{', '.join(keys)}: {text}" for text, keys in asked.items()]
