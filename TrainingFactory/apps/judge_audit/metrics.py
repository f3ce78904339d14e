"""Statistics of a judge audit. A function returns None if its value is undefined, such as the correlation with a
constant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import StatisticsError, correlation, linear_regression, mean


def compute_accuracy(verdicts: Sequence[Hashable], labels: Sequence[Hashable]) -> float | None:
    return mean(a == b for a, b in zip(verdicts, labels, strict=True)) if verdicts else None


def compute_kappa(verdicts: Sequence[Hashable], labels: Sequence[Hashable]) -> float | None:
    """Return Cohen's kappa, the agreement of two raters beyond chance. None if both raters always give the same label,
    because chance explains all agreement then."""
    agreement = compute_accuracy(verdicts, labels)
    return None if agreement is None else scale_beyond_chance(agreement, chance_agreement(verdicts, labels))


def chance_agreement(verdicts: Sequence[Hashable], labels: Sequence[Hashable]) -> float:
    """Return the chance agreement of two independent raters with these label frequencies."""
    verdict_counts, gold_counts = Counter(verdicts), Counter(labels)
    return sum(verdict_counts[label] * gold_counts[label] for label in verdict_counts) / len(verdicts) ** 2


def scale_beyond_chance(agreement: float, chance: float) -> float | None:
    return None if chance == 1 else (agreement - chance) / (1 - chance)


def compute_pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    try:
        return correlation(xs, ys)
    except StatisticsError:  # too few, or a constant
        return None


def partial_correlation(xs: Sequence[float], ys: Sequence[float], control: Sequence[float]) -> float | None:
    """Return the partial correlation of xs and ys, controlling for a linear effect of `control`."""
    return compute_pearson(_compute_residuals(xs, control), _compute_residuals(ys, control))


def _compute_residuals(values: Sequence[float], predictor: Sequence[float]) -> Sequence[float]:
    try:
        slope, intercept = linear_regression(predictor, values)
    except StatisticsError:  # too few values, or a constant, which explains nothing
        return values
    # rounded, because floating-point noise must not look like a correlation
    return [round(value - intercept - slope * x, 9) for value, x in zip(values, predictor, strict=True)]


def compute_spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    return compute_pearson(compute_ranks(xs), compute_ranks(ys))


def compute_ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1; ties get their mean rank."""
    sorted_values = sorted(values)
    first_ranks = {value: rank for rank, value in reversed(list(enumerate(sorted_values, 1)))}
    counts = Counter(values)
    return [first_ranks[value] + (counts[value] - 1) / 2 for value in values]
