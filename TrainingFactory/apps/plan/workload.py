"""The episodes of a planned step: their lengths, turns and latencies, drawn from distributions or taken from a recorded
run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from TrainingFactory.common.image_tokens import VIRTUAL, find_images
from TrainingFactory.config.algorithms import BranchingSection
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.runs.folder import TRAJECTORIES, RunFolder
from TrainingFactory.types import Trajectory

Array = np.ndarray[Any, np.dtype[np.float64]]
NUM_DRAWS = 4000  # episodes drawn for a workload that is given by distributions


class Distribution(NamedTuple):
    """A constant value, or an exponential or lognormal distribution; `mean` is the mean in all three cases."""

    kind: str
    mean: float
    sigma: float = 0.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        if self.kind == "exponential":
            return rng.exponential(self.mean, shape)
        if self.kind == "lognormal":
            return self.mean * np.exp(rng.normal(-(self.sigma**2) / 2, self.sigma, shape))
        return np.full(shape, self.mean)


def parse_distribution(notation: str) -> Distribution:
    """Parse a number, `exponential:MEAN` or `lognormal:MEAN:SIGMA`."""
    family, *parameters = str(notation).split(":")
    if not parameters:
        family, parameters = "constant", [family]
    try:
        numbers = [float(number) for number in parameters]
    except ValueError:
        numbers = []
    num_parameters = {"constant": 1, "exponential": 1, "lognormal": 2}.get(family)
    if len(numbers) != num_parameters or not all(0 <= number < math.inf for number in numbers):
        raise ValueError(f"{notation!r} is not a number >= 0, exponential:MEAN or lognormal:MEAN:SIGMA")
    return Distribution(family, *numbers)


class Workload(NamedTuple):
    """The episodes of a planned step; every array has one entry per episode. A plan uses only means and the expected
    maximum of N durations."""

    prompt_tokens: float  # mean tokens of a task's prompt
    turns: Array
    sampled_tokens: Array  # tokens of all turns
    reply_tokens: Array  # tokens returned by tools
    tool_seconds: Array  # seconds of all tool calls
    reward_seconds: Array  # seconds
    taught_share: float = 1.0  # share of groups whose rewards differ, so that they are trained on
    prompt_image_tokens: float = 0.0  # mean, of the tokens of a prompt
    reply_image_tokens: float = 0.0  # mean of an episode, of the tokens of its replies
    image_tokens: float = 0.0  # mean of an image

    @property
    def image_share(self) -> float:
        """Return the share of image tokens among the tokens of an episode."""
        return (self.prompt_image_tokens + self.reply_image_tokens) / self.num_tokens

    @property
    def images(self) -> float:
        """Return the mean number of images of an episode."""
        return self.image_share * self.num_tokens / max(1.0, self.image_tokens)

    @property
    def num_tokens(self) -> float:
        """Return the mean tokens of an episode."""
        return self.prompt_tokens + float(np.mean(self.sampled_tokens + self.reply_tokens))

    @property
    def context_tokens(self) -> float:
        """Return the mean number of tokens before a sampled token."""
        return (self.prompt_tokens + self.num_tokens) / 2


def draw_workload(distributions: Mapping[str, Distribution], max_turns: int, max_tokens: int) -> Workload:
    """Draw episodes in which every turn but the last calls a tool."""
    rng = np.random.default_rng(0)
    turns = np.clip(np.round(distributions["turns"].draw(rng, (NUM_DRAWS,))), 1, max_turns)
    calls = turns - 1
    image_tokens = distributions["image_tokens"].mean
    prompt_image_tokens = distributions["prompt_images"].mean * image_tokens
    reply_image_tokens = distributions["reply_images"].mean * image_tokens
    return Workload(
        prompt_tokens=distributions["prompt_tokens"].mean + prompt_image_tokens,
        turns=turns,
        sampled_tokens=_sum_draws(distributions["turn_tokens"], turns, rng, max_tokens),
        reply_tokens=_sum_draws(distributions["reply_tokens"], calls, rng) + reply_image_tokens * calls,
        tool_seconds=_sum_draws(distributions["tool_seconds"], calls, rng),
        reward_seconds=distributions["reward_seconds"].draw(rng, (NUM_DRAWS,)),
        taught_share=distributions["taught_share"].mean,
        prompt_image_tokens=prompt_image_tokens,
        reply_image_tokens=reply_image_tokens * float(np.mean(calls)),
        image_tokens=image_tokens,
    )


def workload_from_run(run: RunFolder, tool_seconds: Distribution | None = None) -> Workload:
    """Return the workload of a run's recorded episodes. Tool calls take the recorded time unless `tool_seconds`
    replaces it."""
    path, groups = run.path / TRAJECTORIES, dict[str, list[Trajectory]]()
    for trajectory in load_trajectories(path, is_growing=True) if path.is_file() else []:
        if trajectory.turns:
            groups.setdefault(trajectory.group, []).append(trajectory)
    if not groups:
        requirement = "use a run with logging.save_trajectories and an algorithm that samples"
        raise ValueError(f"--from-run: {run.path} has no episodes in {TRAJECTORIES}; {requirement}")
    rows = [row for row in run.metrics() if row.get("episodes")]
    reward_seconds = sum(row["seconds/reward"] for row in rows) / max(1, sum(row["episodes"] for row in rows))
    return workload_from_groups(list(groups.values()), reward_seconds, tool_seconds)


def workload_from_groups(
    groups: list[list[Trajectory]], reward_seconds: float = 0.0, tool_seconds: Distribution | None = None
) -> Workload:
    """Return the workload of recorded groups. Tool calls of one turn count as parallel."""
    episodes = [episode for group in groups for episode in group]
    first_turns = [episode.turns[0] for episode in episodes]
    prompts = np.array([len(turn.prompt_ids) for turn in first_turns], float)
    sampled_tokens = [sum(len(turn.completion.token_ids) for turn in episode.turns) for episode in episodes]
    last_turns = [episode.turns[-1] for episode in episodes]
    lengths = [len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in last_turns]
    waits_by_episode = [
        [max(result.seconds for result in turn.tool_results) for turn in episode.turns if turn.tool_results]
        for episode in episodes
    ]
    tool_waits = np.array([sum(turn_waits) for turn_waits in waits_by_episode], float)
    if tool_seconds is not None:
        num_calls = np.array([len(turn_waits) for turn_waits in waits_by_episode], float)
        tool_waits = _sum_draws(tool_seconds, num_calls, np.random.default_rng(0))
    prompt_image_tokens = np.array([_count_image_tokens(turn.prompt_ids) for turn in first_turns], float)
    image_token_counts = np.array([_count_image_tokens(turn.prompt_ids) for turn in last_turns], float)
    image_sizes = [tokens.num_tokens for turn in last_turns for tokens in find_images(turn.prompt_ids)]
    taught_flags = [len({str(episode.reward) for episode in group}) > 1 for group in groups]
    return Workload(
        prompt_tokens=float(prompts.mean()),
        turns=np.array([len(episode.turns) for episode in episodes], float),
        sampled_tokens=np.array(sampled_tokens, float),
        reply_tokens=np.maximum(0.0, np.array(lengths) - np.array(sampled_tokens) - prompts),
        tool_seconds=tool_waits,
        reward_seconds=np.full(len(episodes), reward_seconds),
        taught_share=sum(taught_flags) / len(taught_flags),
        prompt_image_tokens=float(prompt_image_tokens.mean()),
        reply_image_tokens=float((image_token_counts - prompt_image_tokens).mean()),
        image_tokens=sum(image_sizes) / max(1, len(image_sizes)),
    )


def _count_image_tokens(token_ids: Sequence[int]) -> int:
    return sum(token >= VIRTUAL for token in token_ids)


def estimate_fork_factor(branching: BranchingSection, turns: Array, group_size: int) -> float:
    """Return the ratio of a group's turns with forks to its turns without. If the config does not list the forked
    turns, all turns count. `max_tokens` is not considered."""
    max_rows = math.inf if branching.max_episodes is None else max(1.0, branching.max_episodes / group_size)
    total_turns = 0.0
    for num_turns in turns.astype(int).tolist():
        num_forks = 0
        for turn in range(1, num_turns + 1):
            total_turns += min(branching.continuations**num_forks, max_rows)
            is_fork_turn = branching.at != "turns" or turn in branching.turns
            num_forks += is_fork_turn and turn % branching.every == 0 and num_forks < branching.max_forks
    return total_turns / float(turns.astype(int).sum())


def _sum_draws(dist: Distribution, counts: Array, rng: np.random.Generator, cap: float = math.inf) -> Array:
    """Return the sum of `counts[i]` draws for every episode i, each draw capped at `cap`."""
    max_count = int(counts.max(initial=0))
    draws = np.minimum(dist.draw(rng, (len(counts), max_count)), cap)
    return np.where(np.arange(max_count) < counts[:, None], draws, 0.0).sum(axis=1)
