"""Statistics of evaluations: success rates with confidence intervals, pass@k and pass^k, and paired differences of two
models on the same tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from TrainingFactory.rollout.metrics import wilson_interval

NUM_RESAMPLES = 10_000
TaskSuccesses = Sequence[bool]  # success of each scored episode


@dataclass(slots=True, frozen=True)
class Estimate:
    """A value and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def estimate_success(tasks: Sequence[TaskSuccesses]) -> Estimate:
    """Return the success rate over all episodes. Because episodes of one task are correlated, the Wilson interval is
    computed for the effective number of independent episodes."""
    num_episodes, num_successes = sum(map(len, tasks)), sum(map(sum, tasks))
    rate = num_successes / num_episodes
    effective_size = compute_effective_size(tasks)
    return Estimate(rate, *wilson_interval(rate * effective_size, effective_size))


def compute_effective_size(tasks: Sequence[TaskSuccesses]) -> float:
    """Return the effective sample size: the number of independent episodes that would give the same variance of the
    success rate. It lies between the number of tasks and the number of episodes. If all episodes succeeded or all
    failed, the variance is unknown, and the effective size is the number of tasks."""
    num_episodes, num_successes = sum(map(len, tasks)), sum(map(sum, tasks))
    rate, num_tasks = num_successes / num_episodes, len(tasks)
    if num_tasks == num_episodes:
        return float(num_episodes)
    if num_successes in (0, num_episodes) or num_tasks < 2:
        return float(num_tasks)
    squared_error = sum((sum(task) - rate * len(task)) ** 2 for task in tasks)
    variance = squared_error / num_episodes**2 * num_tasks / (num_tasks - 1)
    effective_size = rate * (1 - rate) / variance if variance else num_episodes
    return min(float(num_episodes), max(float(num_tasks), effective_size))


def estimate_pass_at(k: int, tasks: Sequence[TaskSuccesses]) -> float | None:
    """Return pass@k, the probability that at least one of k episodes succeeds. The unbiased estimate for c successes in
    n episodes is 1 - C(n - c, k) / C(n, k). None if no task has k scored episodes."""
    return _average([1 - math.comb(len(t) - sum(t), k) / math.comb(len(t), k) for t in tasks if len(t) >= k])


def estimate_pass_all(k: int, tasks: Sequence[TaskSuccesses]) -> float | None:
    """Return pass^k, the probability that all of k episodes succeed. The unbiased estimate is C(c, k) / C(n, k)."""
    return _average([math.comb(sum(t), k) / math.comb(len(t), k) for t in tasks if len(t) >= k])


def _average(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def choose_k_values(max_k: int) -> list[int]:
    """Return the values of k to report for `max_k` episodes per task: powers of two and `max_k` itself."""
    return sorted({max_k, *(2**exponent for exponent in range(max_k.bit_length()) if 2**exponent <= max_k)})


def bootstrap_mean(strata: Sequence[tuple[float, Sequence[float]]], seed: int = 0) -> Estimate:
    """Return the weighted mean of several task sets' means (weight, values), with a stratified bootstrap interval."""
    import numpy as np  # a quarter of a second that most commands do without

    rng, total_weight = np.random.default_rng(seed), sum(weight for weight, _ in strata)
    weighted_mean, sampled_means = 0.0, np.zeros(NUM_RESAMPLES)
    for weight, values in strata:
        value_counts = Counter(values)
        distinct_values, frequencies = np.array(list(value_counts)), np.array(list(value_counts.values()))
        # Drawing n values with replacement equals drawing how often each distinct value occurs: far fewer numbers.
        draws = rng.multinomial(len(values), frequencies / len(values), size=NUM_RESAMPLES)
        weighted_mean += weight / total_weight * fmean(values)
        sampled_means += weight / total_weight * (draws @ distinct_values) / len(values)
    low, high = np.quantile(sampled_means, [0.025, 0.975])
    return Estimate(weighted_mean, float(low), float(high))


def compute_p_value(num_better: int, num_worse: int) -> float:
    """Return the two-sided p-value of McNemar's exact test for the numbers of improved and worsened tasks."""
    num_changed, num_fewer = num_better + num_worse, min(num_better, num_worse)
    tail_count = sum(math.comb(num_changed, n) for n in range(num_fewer + 1))
    return min(1.0, 2 * tail_count / 2**num_changed)
