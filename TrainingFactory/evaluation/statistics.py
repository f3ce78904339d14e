"""The arithmetic of evaluations: shares with their intervals, pass@k and pass^k, and the difference of two models on
the same tasks. Nothing here knows what a model is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from TrainingFactory.rollout.metrics import wilson

RESAMPLES = 10_000
Task = Sequence[bool]  # whether each of its scored episodes succeeded


@dataclass(slots=True, frozen=True)
class Estimate:
    """Holds a figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def success(tasks: Sequence[Task]) -> Estimate:
    """Return the share of episodes that succeeded. Episodes of one task are alike, so that the interval goes by tasks:
    Wilson's for as many independent episodes as would be as uncertain."""
    tried, won = sum(map(len, tasks)), sum(map(sum, tasks))
    share = won / tried
    return Estimate(share, *wilson(share * (size := effective(tasks)), size))


def effective(tasks: Sequence[Task]) -> float:
    """Return how many independent episodes are as uncertain about the share as these, of which those of one task go
    together: at least one a task, at most one each. Where all ended alike nothing tells, and it is one a task."""
    tried, won = sum(map(len, tasks)), sum(map(sum, tasks))
    share, count = won / tried, len(tasks)
    if count == tried:
        return float(tried)
    if won in (0, tried) or count < 2:
        return float(count)
    spread = sum((sum(task) - share * len(task)) ** 2 for task in tasks)
    variance = spread / tried**2 * count / (count - 1)
    return min(float(tried), max(float(count), share * (1 - share) / variance if variance else tried))


def pass_at(k: int, tasks: Sequence[Task]) -> float | None:
    """Return the chance that at least one of k episodes of a task succeeds (pass@k), without bias from the episodes
    there are: of n with c right, 1 - C(n - c, k) / C(n, k). None where no task has k scored episodes."""
    return _mean([1 - math.comb(len(t) - sum(t), k) / math.comb(len(t), k) for t in tasks if len(t) >= k])


def pass_all(k: int, tasks: Sequence[Task]) -> float | None:
    """Return the chance that all of k episodes of a task succeed (pass^k), without bias: C(c, k) / C(n, k)."""
    return _mean([math.comb(sum(t), k) / math.comb(len(t), k) for t in tasks if len(t) >= k])


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def powers(most: int) -> list[int]:
    """Return the k that are told of so many episodes a task: 1, 2, 4, ... and the number itself."""
    return sorted({most, *(2**n for n in range(most.bit_length()) if 2**n <= most)})


def bootstrap(strata: Sequence[tuple[float, Sequence[float]]], seed: int = 0) -> Estimate:
    """Return the weighted mean of the means of several sets of tasks. The interval is that of means over tasks drawn
    anew, with replacement, from each set; the same seed gives the same interval."""
    rng, total = np.random.default_rng(seed), sum(weight for weight, _ in strata)
    value, drawn = 0.0, np.zeros(RESAMPLES)
    for weight, values in strata:
        counts = Counter(values)
        kinds, sizes = np.array(list(counts)), np.array(list(counts.values()))
        # To draw n values with replacement is to draw how often each kind comes: far fewer numbers.
        times = rng.multinomial(len(values), sizes / len(values), size=RESAMPLES)
        value += weight / total * fmean(values)
        drawn += weight / total * (times @ kinds) / len(values)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def exact_test(better: int, worse: int) -> float:
    """Return McNemar's exact p-value, two-sided: how often a fair coin gives so uneven a number of tasks that became
    better and of those that became worse, where only tasks that changed count."""
    changed, fewer = better + worse, min(better, worse)
    tail = sum(math.comb(changed, n) for n in range(fewer + 1))
    return min(1.0, 2 * tail / 2**changed)
