"""Describe the episodes of a planned step: lengths, turns and latencies, by distributions or from a recorded run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder
from TrainingFactory.types import Trajectory

Array = np.ndarray[Any, np.dtype[np.float64]]
DRAWS = 4000  # episodes that stand for a workload given by distributions


class Distribution(NamedTuple):
    """A constant, an exponential or a lognormal quantity; `mean` is its mean in all three cases."""

    kind: str
    mean: float
    sigma: float = 0.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        if self.kind == "exponential":
            return rng.exponential(self.mean, shape)
        if self.kind == "lognormal":
            return self.mean * np.exp(rng.normal(-(self.sigma**2) / 2, self.sigma, shape))
        return np.full(shape, self.mean)


def distribution(text: str) -> Distribution:
    """Read a number, `exponential:MEAN` or `lognormal:MEAN:SIGMA`."""
    kind, *parameters = str(text).split(":")
    if not parameters:
        kind, parameters = "constant", [kind]
    try:
        numbers = [float(number) for number in parameters]
    except ValueError:
        numbers = []
    expected = {"constant": 1, "exponential": 1, "lognormal": 2}.get(kind)
    if len(numbers) != expected or not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{text!r} must be a number, exponential:MEAN or lognormal:MEAN:SIGMA, none below 0")
    return Distribution(kind, *numbers)


class Episodes(NamedTuple):
    """Holds one entry for each episode in every array. All that a plan takes from them are means, and the expected
    maximum of N durations."""

    prompt: float  # tokens of a task's prompt
    turns: Array
    sampled: Array  # tokens of all turns
    replies: Array  # tokens that tools returned
    tool: Array  # seconds of all tool calls
    reward: Array  # seconds
    taught: float = 1.0  # share of the groups whose rewards differ, so that there is something to learn

    @property
    def length(self) -> float:
        """Return the tokens of an episode."""
        return self.prompt + float(np.mean(self.sampled + self.replies))

    @property
    def context(self) -> float:
        """Return the tokens before a sampled one."""
        return (self.prompt + self.length) / 2


def draw_episodes(figures: Mapping[str, Distribution], max_turns: int, max_tokens: int) -> Episodes:
    """Return episodes whose turns all call a tool, except for the last."""
    rng = np.random.default_rng(0)
    turns = np.clip(np.round(figures["turns"].draw(rng, (DRAWS,))), 1, max_turns)
    return Episodes(
        prompt=figures["prompt_tokens"].mean,
        turns=turns,
        sampled=_sum_draws(figures["turn_tokens"], turns, rng, max_tokens),
        replies=_sum_draws(figures["reply_tokens"], turns - 1, rng),
        tool=_sum_draws(figures["tool_seconds"], turns - 1, rng),
        reward=figures["reward_seconds"].draw(rng, (DRAWS,)),
        taught=figures["taught_share"].mean,
    )


def read_episodes(run: RunFolder, tool: Distribution | None = None) -> Episodes:
    """Return the episodes of a run; tool calls take the recorded time unless `tool` replaces it."""
    path, groups = run.path / TRAJECTORIES, dict[str, list[Trajectory]]()
    for trajectory in load_trajectories(path, growing=True) if path.is_file() else []:
        if trajectory.turns:
            groups.setdefault(trajectory.group, []).append(trajectory)
    if not groups:
        text = "a run has them with logging.save_trajectories and an algorithm that samples"
        raise ValueError(f"--from-run: {run.path} has no episodes in {TRAJECTORIES}; {text}")
    rows = [row for row in run.metrics() if row.get("episodes")]
    reward = sum(row["seconds/reward"] for row in rows) / max(1, sum(row["episodes"] for row in rows))
    return as_episodes(list(groups.values()), reward, tool)


def as_episodes(
    groups: list[list[Trajectory]], reward: float = 0.0, tool: Distribution | None = None
) -> Episodes:
    """Return recorded groups as episodes; calls of one turn run in parallel."""
    trajectories = [trajectory for group in groups for trajectory in group]
    prompts = np.array([len(trajectory.turns[0].prompt_ids) for trajectory in trajectories], float)
    sampled = [sum(len(turn.completion.token_ids) for turn in each.turns) for each in trajectories]
    lengths = [
        len(each.turns[-1].prompt_ids) + len(each.turns[-1].completion.token_ids) for each in trajectories
    ]
    waits = [
        [max(result.seconds for result in turn.tool_results) for turn in each.turns if turn.tool_results]
        for each in trajectories
    ]
    seconds = np.array([sum(of_turns) for of_turns in waits], float)
    if tool is not None:
        calls = np.array([len(of_turns) for of_turns in waits], float)
        seconds = _sum_draws(tool, calls, np.random.default_rng(0))
    taught = [len({str(trajectory.reward) for trajectory in group}) > 1 for group in groups]
    return Episodes(
        prompt=float(prompts.mean()),
        turns=np.array([len(each.turns) for each in trajectories], float),
        sampled=np.array(sampled, float),
        replies=np.maximum(0.0, np.array(lengths) - np.array(sampled) - prompts),
        tool=seconds,
        reward=np.full(len(trajectories), reward),
        taught=sum(taught) / len(taught),
    )


def _sum_draws(of: Distribution, counts: Array, rng: np.random.Generator, most: float = math.inf) -> Array:
    """Return the sum of `counts[i]` draws for every episode i, none of them over `most`."""
    width = int(counts.max(initial=0))
    draws = np.minimum(of.draw(rng, (len(counts), width)), most)
    return np.where(np.arange(width) < counts[:, None], draws, 0.0).sum(axis=1)
