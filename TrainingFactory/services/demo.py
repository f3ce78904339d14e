"""What `tfactory demo` shows beside real rollouts: the same task done right."""

from __future__ import annotations

import asyncio

from TrainingFactory.envs import SearchEnvironment
from TrainingFactory.rollout import play
from TrainingFactory.types import Task, Trajectory


def expert_episode(task: Task) -> Trajectory:
    """A search task as somebody plays it who knows how: written by a script, not sampled."""
    from TrainingFactory.models import chat_format
    from TrainingFactory.models.tiny import tiny_tokenizer

    environment = SearchEnvironment(task)
    return asyncio.run(play(environment, chat_format(tiny_tokenizer()), environment.expert()))
