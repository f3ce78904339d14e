"""How fast a machine samples and learns, alone and both at once: the rates behind `benchmarks.plan_check`."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.slow_tools import given_config
from TrainingFactory.apps.plan.workload import workload_from_groups
from TrainingFactory.assembly.learner import make_algorithm, make_policy
from TrainingFactory.assembly.sampler import load, make_chat, make_engine, make_rollouts
from TrainingFactory.envs import SearchEnvironment
from TrainingFactory.types import Trajectory

SIZES = (1, 4, 16)  # of groups
Groups = Sequence[Sequence[Trajectory]]
Work = Callable[[], Awaitable[Any]]


class Rates(NamedTuple):
    step: float  # seconds of a decode step
    row: float  # and of each row in it
    update: float  # of an update
    token: float  # and of each token of its prefix trees
    sampler_overlap: float  # speed of each while both work
    learner_overlap: float


class Machine:
    """Holds a sampler and a learner in this process, as an asynchronous run has them, and measures both."""

    def __init__(self, model: Path, groups: int, options: dict[str, Any]) -> None:
        config = given_config(model, Path(), options | {"optimization.async_rollout": True})
        loaded, self.algorithm, self.groups = load(config), make_algorithm(config), groups
        self.policy = make_policy(config, loaded, self.algorithm, 10**6)
        self.engine = make_engine(config, loaded, 10**6, samples_ahead=True)
        self.rollouts = make_rollouts(config, SearchEnvironment, make_chat(config, loaded))
        self.steps = itertools.count()

    async def play(self, size: int) -> Groups:
        """Play other tasks than before: the prompts of those are still in the cache."""
        step = next(self.steps)
        tasks = list(SearchEnvironment.tasks("train", 1000 + step, self.groups))
        return await self.rollouts.rollout_batch(tasks, self.engine, size, step=step)

    async def learn(self, groups: Groups) -> None:
        rows = [row for group in groups for row in self.algorithm.samples(group)]
        await self.policy.step(rows, next(self.steps))

    async def measure(self, times: int) -> Rates:
        """Return medians of measurements that take turns."""
        episodes = {size: await self.play(size) for size in SIZES}  # warms up
        await self.learn(episodes[SIZES[0]])
        plays: dict[int, Work] = {size: partial(self.play, size) for size in SIZES}
        learns: dict[int, Work] = {size: partial(self.learn, episodes[size]) for size in SIZES[1:]}
        work: dict[tuple[str, int], tuple[Work, Work | None]] = {("play", n): (plays[n], None) for n in plays}
        for n in learns:
            work |= {("learn", n): (learns[n], None), ("play beside", n): (plays[n], learns[n])}
            work["learn beside", n] = learns[n], plays[n]
        seconds: dict[tuple[str, int], list[float]] = {name: [] for name in work}
        spent: dict[int, list[tuple[float, float]]] = {size: [] for size in SIZES}  # decode steps and tokens
        for _ in range(times):
            for name, (one, other) in work.items():
                took, result = await beside(one, other)
                seconds[name].append(took)
                if name[0] == "play":
                    spent[name[1]].append(counted(result))
        found = {name: statistics.median(each) for name, each in seconds.items()}
        # Relative errors count, so that few rows are as well known as many.
        taken = np.array([np.mean(spent[n], axis=0) / found["play", n] for n in SIZES])
        (step, row), *_ = np.linalg.lstsq(taken, np.ones(len(SIZES)))
        trees = [tree_tokens(episodes[n]) for n in learns]
        token = (found["learn", SIZES[2]] - found["learn", SIZES[1]]) / (trees[1] - trees[0])
        update = found["learn", SIZES[1]] - token * trees[0]
        overlaps = [
            statistics.fmean(found[part, n] / found[f"{part} beside", n] for n in learns)
            for part in ("play", "learn")
        ]
        return Rates(float(step), float(row), update, token, *overlaps)

    async def close(self) -> None:
        await self.engine.close()
        await self.policy.close()


async def beside(work: Work, other: Work | None) -> tuple[float, Any]:
    """Return the seconds of work while other work is repeated, and what it returns."""
    ended = False

    async def repeat() -> None:
        while other is not None and not ended:
            await other()

    repeated = asyncio.create_task(repeat())
    await asyncio.sleep(0.05 if other else 0.0)  # until it is under way
    started = time.perf_counter()
    result = await work()
    seconds = time.perf_counter() - started
    ended = True
    await repeated
    return seconds, result


def counted(groups: Groups) -> tuple[float, float]:
    """Return decode steps and sampled tokens: without latencies, the longest episode decides how many steps."""
    sampled = workload_from_groups([list(group) for group in groups]).sampled_tokens
    return float(sampled.max()), float(sampled.sum())


def tree_tokens(groups: Groups) -> float:
    """Return the tokens of the prefix trees of all groups with something to learn: each counts its prompt once."""
    trees = [workload_from_groups([list(group)]) for group in groups]
    return sum(
        tree.taught_share * (tree.num_tokens * len(tree.turns) - tree.prompt_tokens * (len(tree.turns) - 1))
        for tree in trees
    )
