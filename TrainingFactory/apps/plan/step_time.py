"""A model of step time: the expected seconds of a training step from the costs of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from TrainingFactory.apps.plan.workload import Array, Workload

FIXED_POINT_STEPS = 16  # iterations of the fixed point for the number of concurrently decoding rows


class Costs(NamedTuple):
    """Seconds of the parts of a step. A decode step of n rows takes `launch + max(read, n * compute) + n * row`."""

    launch: float = 0.0  # fixed overhead of a decode step
    read: float = 0.0  # reading the weights, once per decode step
    compute: float = 0.0  # compute of one row's token
    row: float = 0.0  # sampling and KV-cache reads of one row
    prompts: float = 0.0  # prefill of one episode's prompts and tool replies; blocks its sampler's other rows
    renewal: float = 0.0  # prefill of one episode's context after new weights; blocks the same rows
    turn: float = 0.0  # overhead of a turn in its sampler; blocks the same rows
    driver: float = 0.0  # overhead of a turn in the process that plays all episodes
    update: float = 0.0
    write: float = 0.0  # writing new weights, while sampling continues
    load: float = 0.0  # loading new weights, while sampling pauses
    record: float = 0.0  # between two steps
    evaluation: float = 0.0  # per step, averaged
    checkpoint: float = 0.0  # per step, averaged
    sampler_overlap: float = 1.0  # relative speed of the sampler while the learner works on the same GPU
    learner_overlap: float = 1.0  # relative speed of the learner while the sampler works on the same GPU

    @property
    def learner_seconds(self) -> float:
        """Return the seconds from the last episode of a step to the start of the next step."""
        return self.update + self.write + self.load + self.record + self.evaluation + self.checkpoint

    def estimate_decode(self, num_rows: float) -> float:
        return self.launch + max(self.read, num_rows * self.compute) + num_rows * self.row


@dataclass(frozen=True)
class StepModel:
    """A step: sampling `groups` groups of `group_size` episodes on `samplers` engines with `slots` slots each, then the
    learner's part. A step waits for its last episode, so its time depends on the expected maximum of the episodes'
    durations, not on their mean. Up to `1 + max_staleness` steps overlap."""

    workload: Workload
    costs: Costs
    groups: int
    group_size: float  # with forks: episodes with the same number of turns
    slots: int
    samplers: int = 1
    max_staleness: int = 0
    refill: int = 0  # further attempts for a group whose rewards are all equal

    @property
    def expected_attempts(self) -> float:
        """Return the expected number of times that a group is sampled."""
        return sum((1 - self.workload.taught_share) ** attempt for attempt in range(self.refill + 1))

    @property
    def num_episodes(self) -> float:
        """Return the expected number of episodes sampled for a step."""
        return self.groups * self.group_size * self.expected_attempts

    def estimate_seconds(self) -> float:
        """Return the seconds of a step.

        An episode takes longer if more rows decode concurrently. By Little's law the number of concurrently decoding
        rows is episodes x seconds of decoding / seconds of sampling. Both values are iterated to a fixed point.
        """
        episodes, costs, max_overlap = self.num_episodes / self.samplers, self.costs, 1 + self.max_staleness
        used_slots = max(1.0, min(self.slots, max_overlap * episodes))  # episodes of a sampler at a time
        num_waves = max(1.0, episodes / used_slots)
        num_rows, pushes, step_seconds = used_slots, 0.0, 0.0
        for _ in range(FIXED_POINT_STEPS):
            busy_seconds = self._estimate_sampler_seconds(num_rows, pushes)
            durations = busy_seconds + self.workload.tool_seconds + self.workload.reward_seconds
            durations = durations + self.workload.turns * costs.driver
            mean_seconds = float(durations.mean())
            sampling_seconds = (num_waves - 1) * mean_seconds + self._estimate_longest(durations, used_slots)
            driver_seconds = self.num_episodes * float(self.workload.turns.mean()) * costs.driver
            sampling_seconds = max(sampling_seconds, driver_seconds)
            if self.max_staleness:
                sampler_seconds = self._estimate_sampler_seconds(used_slots, pushes)
                work_seconds = episodes * float(sampler_seconds.mean()) / used_slots
                slot_seconds = episodes * mean_seconds / used_slots + costs.load
                step_seconds = max(self._bound_seconds(sampling_seconds, work_seconds), slot_seconds)
                window_seconds = step_seconds - costs.load
                pushes = mean_seconds / step_seconds if step_seconds else 0.0
            else:
                step_seconds, window_seconds = sampling_seconds + costs.learner_seconds, sampling_seconds
            num_decoding = episodes * float(busy_seconds.mean()) / window_seconds if window_seconds else 0.0
            num_rows = (num_rows + min(used_slots, max(1.0, num_decoding))) / 2
        return step_seconds

    def _estimate_sampler_seconds(self, num_rows: float, pushes: float) -> Array:
        """Return the seconds that each episode spends in its sampler while `num_rows` episodes decode concurrently."""
        costs = self.costs
        blocked_seconds = costs.prompts + pushes * costs.renewal + self.workload.turns * costs.turn
        return self.workload.sampled_tokens * costs.estimate_decode(num_rows) + num_rows * blocked_seconds

    def _estimate_longest(self, durations: Array, used_slots: float) -> float:
        """Return the expected seconds of the longest episode that a step waits for, summed over the rounds of refilled
        groups and weighted by the probability of each round."""
        equal_share, wait_seconds = 1 - self.workload.taught_share, 0.0
        for attempt in range(self.refill + 1):
            probability = 1 - (1 - equal_share**attempt) ** self.groups
            num_groups = self.groups * equal_share**attempt
            num_episodes = min(num_groups * self.group_size, used_slots * self.samplers)
            wait_seconds += probability * expect_maximum(durations, max(self.group_size, num_episodes))
        return wait_seconds

    def _bound_seconds(self, sampling_seconds: float, work_seconds: float) -> float:
        """Return the seconds of a step if sampling and learning overlap: the larger of two bounds. Latency: a step's
        episodes and its learner's part may span `1 + max_staleness` steps. Throughput: each step takes the work of one
        step. On a shared device both run at reduced speed while they overlap; on separate devices the speeds are 1."""
        depth, costs = 1 + self.max_staleness, self.costs
        learning_seconds = costs.learner_seconds - costs.load
        overlap_seconds = min(work_seconds / costs.sampler_overlap, learning_seconds / costs.learner_overlap)
        lost = overlap_seconds * ((depth - 1) * (1 - costs.sampler_overlap) + 1 - costs.learner_overlap)
        saving = overlap_seconds * (costs.sampler_overlap + costs.learner_overlap - 1)
        latency = (sampling_seconds + costs.learner_seconds + lost) / depth
        return max(latency, work_seconds + learning_seconds - saving + costs.load)


def expect_maximum(values: Array, num_draws: float) -> float:
    """Return the expected maximum of `num_draws` draws from `values`: of m sorted values, the i-th is the maximum with
    probability (i / m) ** num_draws - ((i - 1) / m) ** num_draws."""
    cumulative = (np.arange(len(values) + 1) / len(values)) ** num_draws
    return float(np.sort(values) @ np.diff(cumulative))
