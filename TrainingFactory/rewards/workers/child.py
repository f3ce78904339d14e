"""Scores episodes inside a reward's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from TrainingFactory.data.trajectories import trajectory_from_dict
from TrainingFactory.rewards.adapt import Adapted
from TrainingFactory.rewards.loading import load_reward
from TrainingFactory.rewards.workers.failures import failure_to_dict
from TrainingFactory.rewards.workers.finished_episode import FinishedEpisode

Rows = list[dict[str, Any]]


def start(settings: dict[str, Any]) -> Callable[[Rows], dict[str, Any]]:
    """Load the reward, and return what scores the trajectories of one call."""
    reward = load_reward(settings["target"], settings["options"])
    runner = asyncio.Runner()  # one for all calls: an async reward may keep a connection
    return lambda rows: runner.run(_score(reward, rows))


async def _score(reward: Adapted, rows: Rows) -> dict[str, Any]:
    try:
        found = await reward.group([FinishedEpisode(trajectory_from_dict(row)) for row in rows])
    except Exception as error:  # rewards are foreign code
        return failure_to_dict(error)
    return {
        "rewards": [failure_to_dict(each) if isinstance(each, Exception) else asdict(each) for each in found]
    }
