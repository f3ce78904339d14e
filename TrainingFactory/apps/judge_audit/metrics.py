"""The arithmetic of a judge's audit. None where a metric is not defined, such as the correlation with a constant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import StatisticsError, correlation, linear_regression, mean


def accuracy(given: Sequence[Hashable], right: Sequence[Hashable]) -> float | None:
    return mean(a == b for a, b in zip(given, right, strict=True)) if given else None


def kappa(given: Sequence[Hashable], right: Sequence[Hashable]) -> float | None:
    """Return Cohen's kappa: agreement beyond what two raters with these habits would reach by chance. None if both
    always say the same thing, where chance explains everything."""
    agreed = accuracy(given, right)
    return None if agreed is None else beyond(agreed, chance(given, right))


def chance(given: Sequence[Hashable], right: Sequence[Hashable]) -> float:
    """Return the agreement of two raters with these habits who do not look."""
    habits, truths = Counter(given), Counter(right)
    return sum(habits[label] * truths[label] for label in habits) / len(given) ** 2


def beyond(agreed: float, by_chance: float) -> float | None:
    return None if by_chance == 1 else (agreed - by_chance) / (1 - by_chance)


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    try:
        return correlation(xs, ys)
    except StatisticsError:  # too few, or a constant
        return None


def partial(xs: Sequence[float], ys: Sequence[float], given: Sequence[float]) -> float | None:
    """Return the correlation of xs and ys that is left when what a straight line in `given` explains is taken off."""
    return pearson(_rest(xs, given), _rest(ys, given))


def _rest(values: Sequence[float], given: Sequence[float]) -> Sequence[float]:
    try:
        slope, start = linear_regression(given, values)
    except StatisticsError:  # too few, or a constant, which explains nothing
        return values
    # rounding alone is no correlation
    return [round(v - start - slope * g, 9) for v, g in zip(values, given, strict=True)]


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    return pearson(ranks(xs), ranks(ys))


def ranks(values: Sequence[float]) -> list[float]:
    """Return places from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered, 1)))}
    counts = Counter(values)
    return [first[value] + (counts[value] - 1) / 2 for value in values]
