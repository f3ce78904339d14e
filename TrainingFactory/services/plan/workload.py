"""The episodes of a simulated step: lengths, turns and latencies, drawn or taken from a run that was recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.services.runs.folder import TRAJECTORIES, RunFolder
from TrainingFactory.types import Trajectory

Draw = Callable[[np.random.Generator], float]


class Turn(NamedTuple):
    new: int  # tokens of the prompt, or of what came back since the turn before
    sampled: int
    tool: float = 0.0  # seconds until its replies are there; 0: it called none


class Played(NamedTuple):
    episodes: Sequence[Sequence[Turn]]  # of a group
    rewards: Sequence[float]  # seconds of each
    taught: bool = True  # its rewards differ, so that there is something to learn

    @property
    def sampled(self) -> int:
        return sum(turn.sampled for episode in self.episodes for turn in episode)

    @property
    def length(self) -> float:  # of a row, in the mean
        return sum(turn.new + turn.sampled for each in self.episodes for turn in each) / len(self.episodes)

    @property
    def tree_tokens(self) -> float:  # with their prompt counted once
        return self.length * len(self.episodes) - self.episodes[0][0].new * (len(self.episodes) - 1)


Workload = Callable[[np.random.Generator, int], Played]  # a group of a size


def distribution(text: str) -> Draw:
    """Read how a quantity is distributed; both shapes have the mean that is written."""
    name, *rest = str(text).split(":")
    try:
        mean, *more = [float(each) for each in rest or [name]]
        kind = (name if rest else "", len(more))
        if min(mean, *more, 0) == 0 and math.isfinite(sum([mean, *more])):
            if kind in (("", 0), ("exponential", 0)):
                return (lambda rng: rng.exponential(mean)) if rest else lambda _: mean
            if kind == ("lognormal", 1):
                return lambda rng: mean * math.exp(rng.normal(-(more[0] ** 2) / 2, more[0]))
    except ValueError:
        pass
    raise ValueError(f"{text!r} must be a number, exponential:MEAN or lognormal:MEAN:SIGMA")


def drawn(given: Mapping[str, Draw], max_turns: int, max_tokens: int) -> Workload:
    """Return groups by distributions; every turn but the last calls a tool."""

    def draw(rng: np.random.Generator, size: int) -> Played:
        def some(name: str, most: float = math.inf) -> int:
            return int(min(most, max(1, round(given[name](rng)))))

        prompt, episodes = some("prompt_tokens"), list[list[Turn]]()
        for _ in range(size):
            new = [prompt, *(some("reply_tokens") for _ in range(some("turns", max_turns) - 1))]
            sampled = [some("turn_tokens", max_tokens) for _ in new]
            episodes.append([*map(Turn, new, sampled, [*(given["tool_seconds"](rng) for _ in new[1:]), 0.0])])
        rewards = [given["reward_seconds"](rng) for _ in episodes]
        return Played(episodes, rewards, bool(rng.random() < given["taught_share"](rng)))

    return draw


def recorded(run: RunFolder, tool: Draw | None = None) -> Workload:
    """Return groups of a run, of another size where that is asked; calls take what they did, or what `tool` says."""
    path, groups = run.path / TRAJECTORIES, dict[str, list[Trajectory]]()
    for each in load_trajectories(path, growing=True) if path.is_file() else []:
        if each.turns:
            groups.setdefault(each.group, []).append(each)
    if not groups:
        text = "a run has them with logging.save_trajectories and an algorithm that samples"
        raise ValueError(f"--from-run: {run.path} has no episodes in {TRAJECTORIES}; {text}")
    played = [as_played(group) for group in groups.values()]
    rows = [row for row in run.metrics() if row.get("episodes")]
    reward = sum(row["seconds/reward"] for row in rows) / max(1, sum(row["episodes"] for row in rows))

    def draw(rng: np.random.Generator, size: int) -> Played:
        group = played[rng.integers(len(played))]
        order = [n for _ in range(size) for n in rng.permutation(len(group.episodes))][:size]
        chosen = [group.episodes[n] for n in order]
        if tool is not None:
            chosen = [[turn._replace(tool=tool(rng) if turn.tool else 0.0) for turn in one] for one in chosen]
        return Played(chosen, [reward] * size, group.taught)

    return draw


def as_played(group: Sequence[Trajectory]) -> Played:
    """Return a group of episodes; its rewards take no time."""
    taught = len({str(each.reward) for each in group}) > 1
    return Played([_turns(each) for each in group], [0.0] * len(group), taught)


def _turns(episode: Trajectory) -> list[Turn]:
    """Return lengths and latencies; calls of one turn run side by side."""
    found, before = list[Turn](), 0
    for turn in episode.turns:
        sampled = len(turn.completion.token_ids)
        tools = [max(1e-9, each.seconds) for each in turn.tool_results]
        found.append(Turn(max(0, len(turn.prompt_ids) - before), sampled, max(tools, default=0.0)))
        before = len(turn.prompt_ids) + sampled
    return found
