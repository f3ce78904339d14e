"""What a config asks for and a run will not do, in one line each: commands and trainers print them."""

from __future__ import annotations

from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.learner import importance_cap
from TrainingFactory.cluster.launcher import launched
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.not_yet import changed, not_yet
from TrainingFactory.rewards.rules.code import ToolRule
from TrainingFactory.rewards.rules.tool_verified import rule_or_verifier

AHEAD = ("async_rollout", "max_staleness", "async_order")


def notices(config: TrainingConfig, *, rewarded: bool = False) -> list[str]:
    """Return one line for each feature that is not there yet, or not for this reward. `rewarded`: a reward is handed in
    in place of the config's."""
    return [*not_yet(config), *_about_processes(config, rewarded)]


def unused(config: TrainingConfig, *, played: bool = False, heldout: bool = False) -> list[str]:
    """Return one line for each part of the config that was changed from its default and that training does not look
    at. `played`: an environment is there beside the config; `heldout`: so are rows to evaluate on."""
    training, name = config.training, config.training.algorithm
    kind = KINDS[name]
    lines = [
        (changed(config, other), f"these are options of {other}, and this run trains by {name}")
        for other in KINDS
        if other != name
    ]
    if not kind.samples:
        grouped = [key for key in changed(config, "training") if key == "training.group_size"]
        lines.append((grouped, f"{name} samples no groups of episodes"))
        place = config.environment
        played = played or (place.environment_id or place.command) is not None or bool(config.tools)
        if not (played and training.eval_every is not None):
            expert = kind.demonstrations and config.data.dataset is None
            read = {"sampling.max_reply_tokens"} if expert else set()
            shown = [key for key in changed(config, "sampling") if key not in read]
            if not expert:
                shown += [key for key in changed(config, "environment") if key == "environment.num_workers"]
            lines.append((shown, f"{name} samples nothing without an environment and training.eval_every"))
    ahead = [key for key in changed(config, "optimization") if key.split(".")[1] in AHEAD]
    if not kind.samples:
        lines.append((ahead, f"{name} samples nothing that it trains on"))
    elif not config.optimization.async_rollout:
        lines.append((ahead, "they are for optimization.async_rollout=true"))
    if importance_cap(config) is None:
        weighed = [key for key in changed(config, "optimization") if "importance" in key or "mismatch" in key]
        why = "the learner itself samples, and weights nothing without optimization.importance_cap"
        lines.append((weighed, why if kind.samples else f"{name} samples nothing that it learns from"))
    if config.compute.backend != "ray":
        own = {f"compute.{key}" for key in ("allocation_id", "start_timeout", "learners", "num_gpus")}
        lines.append(
            ([key for key in changed(config, "compute") if key not in own], "they are for backend=ray")
        )
        far = [f"tools.{number}.remote" for number, entry in enumerate(config.tools) if entry.remote]
        lines.append((far, "tools run in the run's own process without compute.backend=ray"))
    if config.compute.learners == 1 or (config.compute.learners is None and launched() is None):
        kept = [key for key in changed(config, "optimization") if key == "optimization.offload_reference"]
        lines.append((kept, "it is for several learners (compute.learners)"))
    if training.eval_every is None:
        measured = [key for key in changed(config, "data") if key.startswith("data.heldout")]
        measured += ["heldout"] if heldout else []
        lines.append((measured, "nothing is evaluated without training.eval_every"))
    if config.model.adapter is not None:
        form = [key for key in changed(config, "lora") if key != "lora.enabled"]
        lines.append((form, "model.adapter is loaded in the form that it was made in"))
    elif not config.lora.enabled:
        lines.append((changed(config, "lora"), "there is no adapter without lora.enabled=true"))
    return [f"{', '.join(keys)}: {text}" for keys, text in lines if keys]


def _about_processes(config: TrainingConfig, rewarded: bool) -> list[str]:
    """Return what cannot be scored in other processes, though that was asked for."""
    asked, section = config.optimization, config.reward
    if not asked.distributed_reward:
        unread = "optimization.reward_workers: it is for optimization.distributed_reward=true"
        return [unread] if asked.reward_workers is not None else []
    parts = [*section.parts.values()] or [{"type": section.type, "options": section.options}]
    types = [(part.get("type", ""), part.get("options") or {}) for part in parts]
    stay = [kind for kind, options in types if not _can_leave(kind, options)]
    if rewarded or not stay:
        return []
    kinds = ", ".join(dict.fromkeys(stay))
    return [
        f"optimization.distributed_reward: rewards of the type {kinds} stay in the run's process, because they ask an "
        "endpoint, or need its tools, models or environments"
    ]


def _can_leave(kind: str, options: Any) -> bool:
    if kind not in ("rule_based", "tool_verified"):
        return kind in ("function", "process_reward")
    try:
        return not isinstance(rule_or_verifier(options), ToolRule)
    except ValueError:
        return True  # told when the reward is made
