"""The reward that a model is measured by, in a run and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.protocols import RewardFunction
from TrainingFactory.rewards.adapt import Adapted, compares
from TrainingFactory.rewards.combined import Combined

OWN = "the environment's own reward"
# reward.type -> the option that tells one of this type from another
TOLD_BY = {"function": "function", "rule_based": "rule", "tool_verified": "verify"}


def evaluation_reward(
    reward: RewardFunction | None, say: Callable[[str], None] = lambda _: None
) -> RewardFunction | None:
    """Return what a model is measured by. Comparisons within a group have the same mean however good
    the model is, so they are left out: the other parts of the reward measure, or where there are none, the
    environment's own reward."""
    if not compares(reward):
        return reward
    inner: Any = reward.function if isinstance(reward, Adapted) else reward
    rest = inner.without_comparisons() if isinstance(inner, Combined) else None
    by = OWN if rest is None else _parts(rest.rewards)
    say(
        f"note: the reward compares the episodes of a group, which cannot measure progress; evaluation goes by {by}"
    )
    return rest


def scored_by(config: TrainingConfig, measuring: RewardFunction | None) -> str:
    """Say in words whose reward that is; `measuring` is what `evaluation_reward` made of the config's."""
    reward = config.reward
    if isinstance(measuring, Combined):
        return _parts(measuring.rewards)
    if reward.type == "environment" or (measuring is None and reward.type != "learned"):
        return OWN
    name = reward.options.get(TOLD_BY.get(reward.type, "")) or reward.model
    return f"reward.type={reward.type}" + (f" ({name})" if name else "")


def _parts(names: Iterable[str]) -> str:
    return f"the parts {', '.join(names)}"
