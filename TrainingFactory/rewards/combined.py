"""Several rewards as weighted parts of one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, validate_call

from TrainingFactory.common.options import STRICT
from TrainingFactory.common.user_code import failure
from TrainingFactory.protocols import Episode
from TrainingFactory.rewards.adapt import Adapted, Unscored, alone, as_reward, environment_reward
from TrainingFactory.types import Reward

ENVIRONMENT = "environment"  # stands for the environment's own reward


class Combined:
    """Add up rewards by their weights. If one cannot score, the whole is unscored: half a reward would be wrong."""

    @validate_call(config=STRICT)
    def __init__(
        self,
        parts: Annotated[Mapping[str, tuple[float, Any]], Field(min_length=1)],
        *,
        timeout: float | None = 60.0,
    ) -> None:
        self.weights = {name: weight for name, (weight, _) in parts.items()}
        self.rewards: dict[str, Adapted] = {}
        for name, (_, reward) in parts.items():
            if not name or "/" in name:
                raise ValueError(f"{name!r} cannot be the name of a part; it must be a text without /")
            own = reward.timeout if isinstance(reward, Adapted) else None
            function = environment_reward if reward == ENVIRONMENT else reward
            self.rewards[name] = as_reward(function, name, own or timeout)

    @property
    def grouped(self) -> bool:
        return any(part.grouped for part in self.rewards.values())

    @property
    def compares(self) -> bool:
        return any(part.compares for part in self.rewards.values())

    def without_comparisons(self) -> Combined | None:
        """Return the parts that say something about one episode alone, if there are any."""
        parts = {name: (self.weights[name], part) for name, part in self.rewards.items() if not part.compares}
        return Combined(parts, timeout=None) if parts else None

    async def __call__(self, episode: Episode) -> Reward:
        return await alone(self, episode)

    async def group(self, episodes: Sequence[Episode]) -> list[Reward | Exception]:
        async def part(reward: Adapted) -> list[Reward | Exception]:
            try:
                return await reward.group(episodes)
            except Exception as error:  # of all of them
                return [error] * len(episodes)

        columns = await asyncio.gather(*map(part, self.rewards.values()))
        return [self._sum(dict(zip(self.rewards, row, strict=True))) for row in zip(*columns, strict=True)]

    def _sum(self, found: Mapping[str, Reward | Exception]) -> Reward | Exception:
        failed = {name: error for name, error in found.items() if isinstance(error, Exception)}
        if failed:
            unscored = Unscored("; ".join(f"part {name}: {failure(error)}" for name, error in failed.items()))
            unscored.__cause__ = next(iter(failed.values()))
            return unscored
        return weighted(
            {name: each for name, each in found.items() if isinstance(each, Reward)}, self.weights
        )


def weighted(rewards: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """Return the sum of rewards of one episode. A part without steps has zeros."""
    steps = [0.0] * max(len(reward.steps) for reward in rewards.values())
    outcome, parts = 0.0, {}
    for name, reward in rewards.items():
        weight = weights[name]
        outcome += weight * reward.outcome
        for turn, step in enumerate(reward.steps):
            steps[turn] += weight * step
        parts[name] = reward.outcome + sum(reward.steps)
        if len(reward.parts) > 1:
            parts |= {f"{name}/{inner}": value for inner, value in reward.parts.items()}
    return Reward(outcome, steps, parts)
