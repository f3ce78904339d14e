"""Episodes of the search task done well and badly, for reward models to learn from and to score."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from typing import Any

import torch

from tests.kits.preference import Group
from TrainingFactory.apps.demo.lessons import demonstrate
from TrainingFactory.envs import SearchEnvironment
from TrainingFactory.learning.learner import Learner
from TrainingFactory.models import LoadedModel, chat_format, load_model
from TrainingFactory.models.words import NAMES, PLACES
from TrainingFactory.rollout import play
from TrainingFactory.types import Message, Reward, Sample, ToolCall


@cache
def fresh() -> LoadedModel:
    return load_model("builtin:tiny", seed=0)


def chat() -> Any:
    return chat_format(fresh().tokenizer, stop_ids=fresh().stop_ids)


def good_and_bad(split: str, count: int) -> list[Group]:
    """Each task done well and badly."""
    tasks, rng, writes = list(SearchEnvironment.tasks(split, 0, count)), random.Random(split), chat()
    good, bad = (demonstrate(SearchEnvironment, writes, tasks, mistakes, rng) for mistakes in (0.0, 1.0))
    return [list(pair) for pair in zip(good, bad, strict=True)]


def one_bad_turn(split: str, count: int) -> list[Group]:
    """The expert's dialogue with one turn too many, a search for a place, or with a person for an answer."""
    rng, writes = random.Random(split), chat()

    async def all_dialogues() -> list[Group]:
        found = []
        for task in SearchEnvironment.tasks(split, 0, count):
            environment = SearchEnvironment(task)
            script, bad = list(environment.expert()), rng.randrange(4)
            if bad == 3:
                script[-1] = Message("assistant", rng.choice(NAMES))
            else:
                call = ToolCall("search", {"query": rng.choice(PLACES)})
                script.insert(bad, Message("assistant", tool_calls=[call]))
            trajectory = await play(environment, writes, script)
            at = min(bad, len(script) - 1)
            trajectory.reward = Reward(0.0, [float(number != at) for number in range(len(script))])
            found.append([trajectory])
        return found

    return asyncio.run(all_dialogues())


def row_scores(learner: Learner, row: Sample) -> torch.Tensor:
    """One row, no packing, the model's own attention: the head at the trained tokens."""
    states = learner.causal_lm.base_model(torch.tensor([row.token_ids]), use_cache=False).last_hidden_state[0]
    assert learner.head is not None
    return learner.head(states[torch.tensor(row.loss_mask)])
