"""Compute the seconds of a training step from the expected work of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from TrainingFactory.apps.plan.workload import Array, Episodes

PASSES = 16  # of the fixed point for the rows that decode at a time


class Costs(NamedTuple):
    """Seconds of the parts of a step. A decode step of n rows takes
    `launch + max(read, n * compute) + n * row`."""

    launch: float = 0.0  # of a decode step, whatever is in it
    read: float = 0.0  # the weights, once for each decode step
    compute: float = 0.0  # operations of one row's token
    row: float = 0.0  # one row's sampling, and its keys and values
    prompts: float = (
        0.0  # prompts and tool replies of one episode, which hold up the other rows of its sampler
    )
    renewal: float = 0.0  # the context of one episode again, after new weights
    turn: float = 0.0  # of a turn in its sampler, likewise
    driver: float = 0.0  # of a turn in the process that plays all episodes
    update: float = 0.0
    write: float = 0.0  # of new weights, during which sampling continues
    load: float = 0.0  # of new weights, during which sampling stops
    record: float = 0.0  # between two steps
    evaluation: float = 0.0  # a step's share
    checkpoint: float = 0.0  # a step's share
    sampler_overlap: float = 1.0  # speed of the sampler while the learner works, and the reverse
    learner_overlap: float = 1.0

    @property
    def learner(self) -> float:
        """Return the seconds from the last episode of a step to the start of the next step."""
        return self.update + self.write + self.load + self.record + self.evaluation + self.checkpoint

    def decode(self, rows: float) -> float:
        return self.launch + max(self.read, rows * self.compute) + rows * self.row


@dataclass(frozen=True)
class StepModel:
    """A step: `groups` of `group_size` episodes on `samplers` engines that run `slots` episodes each, then the
    learner's part. A step waits for its last episode: the expected maximum of their durations counts, not the mean. Up
    to `1 + max_staleness` steps are under way at a time."""

    episodes: Episodes
    costs: Costs
    groups: int
    group_size: int
    slots: int
    samplers: int = 1
    max_staleness: int = 0
    refill: int = 0  # further attempts for a group whose rewards are all equal

    @property
    def attempts(self) -> float:
        """Return how often a group is sampled."""
        return sum((1 - self.episodes.taught) ** attempt for attempt in range(self.refill + 1))

    @property
    def count(self) -> float:
        """Return the episodes that are sampled for a step."""
        return self.groups * self.group_size * self.attempts

    def seconds(self) -> float:
        """Return the seconds of a step.

        The more rows decode at a time, the longer an episode takes; by Little's law the rows in turn are episodes x
        seconds of decoding / seconds of sampling. So the two are computed in turns until they agree.
        """
        count, costs, depth = self.count / self.samplers, self.costs, 1 + self.max_staleness
        running = max(1.0, min(self.slots, depth * count))  # episodes of a sampler at a time
        waves = max(1.0, count / running)
        rows, pushes, step = running, 0.0, 0.0
        for _ in range(PASSES):
            busy = self._busy(rows, pushes)
            durations = busy + self.episodes.tool + self.episodes.reward + self.episodes.turns * costs.driver
            mean = float(durations.mean())
            sampling = (waves - 1) * mean + self._wait_for_last(durations, running)
            sampling = max(sampling, self.count * float(self.episodes.turns.mean()) * costs.driver)
            if self.max_staleness:
                work = count * float(self._busy(running, pushes).mean()) / running
                step = max(self._ahead(sampling, work), count * mean / running + costs.load)
                window, pushes = step - costs.load, mean / step if step else 0.0
            else:
                step, window = sampling + costs.learner, sampling
            decoding = count * float(busy.mean()) / window if window else 0.0
            rows = (rows + min(running, max(1.0, decoding))) / 2
        return step

    def _busy(self, rows: float, pushes: float) -> Array:
        """Return the seconds of each episode in its sampler, where `rows` episodes decode at a time."""
        costs = self.costs
        blocked = costs.prompts + pushes * costs.renewal + self.episodes.turns * costs.turn
        return self.episodes.sampled * costs.decode(rows) + rows * blocked

    def _wait_for_last(self, durations: Array, running: float) -> float:
        """Return the expected seconds of the longest episode that a step waits for, in each round of refilled groups
        by the probability that there is such a round."""
        equal, seconds = 1 - self.episodes.taught, 0.0
        for attempt in range(self.refill + 1):
            happens = 1 - (1 - equal**attempt) ** self.groups
            together = min(self.groups * equal**attempt * self.group_size, running * self.samplers)
            seconds += happens * expected_maximum(durations, max(self.group_size, together))
        return seconds

    def _ahead(self, sampling: float, work: float) -> float:
        """Return the seconds of a step that is sampled while others are learned from: the episodes of a step may take
        `1 + max_staleness` steps together with its learner's part, and in one step samplers and learner do the work of
        one. While both work on one device each has its reduced speed; with devices of their own the speeds are 1."""
        depth, costs = 1 + self.max_staleness, self.costs
        learning = costs.learner - costs.load
        both = min(work / costs.sampler_overlap, learning / costs.learner_overlap)
        lost = both * ((depth - 1) * (1 - costs.sampler_overlap) + 1 - costs.learner_overlap)
        gained = both * (costs.sampler_overlap + costs.learner_overlap - 1)
        return max((sampling + costs.learner + lost) / depth, work + learning - gained + costs.load)


def expected_maximum(values: Array, count: float) -> float:
    """Return the expected maximum of `count` draws from values: of m sorted ones, the i-th is the maximum with
    probability (i / m) ** count - ((i - 1) / m) ** count."""
    below = (np.arange(len(values) + 1) / len(values)) ** count
    return float(np.sort(values) @ np.diff(below))
