"""Weighted sum of several rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, validate_call

from TrainingFactory.common.options import STRICT
from TrainingFactory.common.user_code import describe_failure
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import AdaptedReward, Unscored, as_reward, environment_reward, score_single
from TrainingFactory.types import Reward

ENVIRONMENT_PART = "environment"  # stands for the environment's own reward


class Combined:
    """Weighted sum of rewards. If one part fails, the episode is unscored, because a partial sum would be wrong."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        parts: Annotated[Mapping[str, tuple[float, Any]], Field(min_length=1)],
        *,
        timeout: float | None = 60.0,
    ) -> None:
        self.weights = {name: weight for name, (weight, _) in parts.items()}
        self.rewards: dict[str, AdaptedReward] = {}
        for name, (_, reward) in parts.items():
            if not name or "/" in name:
                raise ValueError(f"invalid part name {name!r}; use a non-empty name without /")
            reward_timeout = reward.timeout if isinstance(reward, AdaptedReward) else None
            function = environment_reward if reward == ENVIRONMENT_PART else reward
            self.rewards[name] = as_reward(function, name, reward_timeout or timeout)

    @property
    def grouped(self) -> bool:
        return any(reward.grouped for reward in self.rewards.values())

    @property
    def compares(self) -> bool:
        return any(reward.compares for reward in self.rewards.values())

    def without_comparisons(self) -> Combined | None:
        """Return the weighted sum without the parts that compare episodes; None if no part remains."""
        parts = {name: (self.weights[name], part) for name, part in self.rewards.items() if not part.compares}
        return Combined(parts, timeout=None) if parts else None

    async def __call__(self, episode: Episode) -> Reward:
        return await score_single(self, episode)

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        async def score_part(reward: AdaptedReward) -> list[Reward | Exception]:
            try:
                return await reward.group(episodes)
            except Exception as error:  # the whole group failed
                return [error] * len(episodes)

        results = await asyncio.gather(*map(score_part, self.rewards.values()))
        return [
            self._sum_results(dict(zip(self.rewards, row, strict=True))) for row in zip(*results, strict=True)
        ]

    def _sum_results(self, results: Mapping[str, Reward | Exception]) -> Reward | Exception:
        failures = {name: error for name, error in results.items() if isinstance(error, Exception)}
        if failures:
            unscored_error = Unscored(
                "; ".join(f"part {name}: {describe_failure(error)}" for name, error in failures.items())
            )
            unscored_error.__cause__ = next(iter(failures.values()))
            return unscored_error
        rewards = {name: result for name, result in results.items() if isinstance(result, Reward)}
        return combine_rewards(rewards, self.weights)


def combine_rewards(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """Return the weighted sum of one episode's rewards. A reward without steps counts as zero steps."""
    outcome = 0.0
    steps = [0.0] * max(len(reward.steps) for reward in rewards.values())
    parts: dict[str, float] = {}
    for name, reward in rewards.items():
        outcome += weights[name] * reward.outcome
        for turn, step in enumerate(reward.steps):
            steps[turn] += weights[name] * step
        parts[name] = reward.outcome + sum(reward.steps)
        if len(reward.parts) > 1:
            parts |= {f"{name}/{subpart}": value for subpart, value in reward.parts.items()}
    return Reward(outcome, steps, parts)
