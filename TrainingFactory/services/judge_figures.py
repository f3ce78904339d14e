"""The arithmetic of a judge's audit. None where a figure is not defined, such as the correlation with a constant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import mean


def accuracy(given: Sequence[Hashable], right: Sequence[Hashable]) -> float | None:
    return mean(a == b for a, b in zip(given, right, strict=True)) if given else None


def kappa(given: Sequence[Hashable], right: Sequence[Hashable]) -> float | None:
    """Cohen's: agreement beyond what two raters with these habits would reach by chance. None if both always say the
    same thing, where chance explains everything."""
    if not given:
        return None
    habits, truths, count = Counter(given), Counter(right), len(given)
    chance = sum(habits[label] * truths[label] for label in habits) / count**2
    agreed = accuracy(given, right)
    assert agreed is not None
    return None if chance == 1 else (agreed - chance) / (1 - chance)


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    if len(xs) < 2:
        return None
    mean_x, mean_y = mean(xs), mean(ys)
    across = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    spread = math.sqrt(sum((x - mean_x) ** 2 for x in xs) * sum((y - mean_y) ** 2 for y in ys))
    return across / spread if spread > 1e-12 else None


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    return pearson(ranks(xs), ranks(ys))


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of their places."""
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered, 1)))}
    counts = Counter(values)
    return [first[value] + (counts[value] - 1) / 2 for value in values]
