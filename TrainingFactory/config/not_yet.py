"""Options without effect: those whose feature is not there yet, and those that a training run does not use. Nothing is
ignored in silence: commands print these notices."""

from __future__ import annotations

from typing import Any

from TrainingFactory.config.schema import ALGORITHMS, TrainingConfig
from TrainingFactory.config.section import Section

# key -> (the value that says what happens now anyway, or several that work, what to tell a user who set another one)
NOT_YET: dict[str, tuple[Any, str]] = {
    "environment.async_execution": (True, "tools always run while other episodes are sampled"),
    "environment.num_workers": (None, "there are always as many tool workers as episodes"),
    "optimization.async_rollout": (False, "training and sampling do not overlap yet"),
    "sampling.engine": ("native", "vLLM is not connected yet; the native engine samples"),
    "compute.backend": ("local", "Ray is not connected yet; everything runs on this machine"),
    "compute.num_gpus": (None, "one device is used; choose it with model.device"),
}
HERE = (
    "environment",
    "process_reward",
    "tool_verified",
    "learned",
)  # rewards that need what is in this process
TOOL_RULES = ("code_tests", "sql_result")  # so do these rules
SAMPLED = ("grpo", "ppo", "rft")  # learn from episodes that they sample themselves


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
    return [*(f"{', '.join(keys)}: {text}" for text, keys in asked.items()), *_about_workers(config)]


def _about_workers(config: TrainingConfig) -> list[str]:
    """What cannot be scored on other workers, though that was asked for."""
    asked = config.optimization
    if not asked.distributed_reward:
        unread = "optimization.reward_workers: it is for optimization.distributed_reward=true"
        return [unread] if asked.reward_workers is not None else []
    rewards = [config.reward.model_dump(), *config.reward.parts.values()][bool(config.reward.parts) :]
    kinds = [(each.get("type", "environment"), each.get("options")) for each in rewards]
    stay = [kind for kind, options in kinds if kind in HERE or _needs_tools(options)]
    lines = []
    if stay:
        lines.append(
            f"optimization.distributed_reward: rewards of the type {', '.join(dict.fromkeys(stay))} need tools or "
            "models of this process and are computed in it"
        )
    if any(kind == "model_judge" for kind, _ in kinds):
        lines.append(
            "optimization.distributed_reward: a model_judge is asked over the network and needs no workers; its "
            "options base_url (several addresses) and concurrency say how much at a time"
        )
    own = [kind == "function" and (options or {}).get("processes") is not None for kind, options in kinds]
    if all(own):
        lines.append(
            "optimization.distributed_reward: the rewards have processes of their own, which are used"
        )
    return lines


def _needs_tools(options: Any) -> bool:
    """Whether a rule, or one that it depends on, calls tools."""
    while isinstance(options, dict):
        if options.get("rule") in TOOL_RULES:
            return True
        options = options.get("only_if")
    return options in TOOL_RULES  # a rule by its name alone


def unused(config: TrainingConfig, *, played: bool = False, heldout: bool = False) -> list[str]:
    """One line for each part of the config that was changed from its default and that training does not look at.
    `played`: an environment is there beside the config; `heldout`: so are rows to evaluate on."""
    training, data = config.training, config.data
    name = training.algorithm
    lines = [
        (changed(config, other), f"these are options of {other}, and this run trains by {name}")
        for other in ALGORITHMS
        if other != name
    ]
    played = played or config.environment.environment_id is not None or bool(config.tools)
    expert = name == "sft" and data.dataset is None
    if name not in SAMPLED:
        grouped = ["training.group_size"] if "group_size" in _changed(training) else []
        lines.append((grouped, f"{name} samples no groups of episodes"))
        if not (played and training.eval_every is not None):
            shown = [
                key for key in changed(config, "sampling") if not (expert and key.endswith("reply_tokens"))
            ]
            lines.append((shown, f"{name} samples nothing without an environment and training.eval_every"))
    if training.eval_every is None:
        measured = [f"data.{key}" for key in _changed(data) if key.startswith("heldout")]
        measured += ["heldout"] if heldout else []
        lines.append((measured, "nothing is evaluated without training.eval_every"))
    if not config.lora.enabled and config.model.adapter is None:
        lines.append((changed(config, "lora"), "there is no adapter without lora.enabled=true"))
    return [f"{', '.join(keys)}: {text}" for keys, text in lines if keys]


def changed(config: TrainingConfig, section: str) -> list[str]:
    """The keys of a section that are not as they are by default. (That they were written says little: the config of a
    run has them all.)"""
    return [f"{section}.{key}" for key in _changed(getattr(config, section))]


def _changed(section: Section) -> list[str]:
    plain = type(section)()
    return [key for key in type(section).model_fields if getattr(section, key) != getattr(plain, key)]
