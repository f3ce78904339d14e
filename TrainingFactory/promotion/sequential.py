"""Sequential test of paired differences that stays valid if it is checked after every task (testing by betting).

The null hypothesis is "the mean difference is at most `level`", for differences d in [-1, 1] of tasks in an order fixed
in advance. Betting a fraction b of the capital on each task multiplies it by 1 + b (d - level) / (1 + level); the
capital is averaged over several b. Under the null hypothesis it is a supermartingale that starts at 1, so it ever
reaches 1 / alpha with a probability of at most alpha (Ville's inequality), at any stopping time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

BET_FRACTIONS = np.linspace(0.05, 0.95, 19)


def compute_log_capital(differences: ArrayLike, level: float = 0.0) -> NDArray[np.float64]:
    """Return the logarithm of the capital after each task; the tasks are the last axis."""
    log_gains = (np.asarray(differences, dtype=float) - level) / (1 + level)
    log_capitals = np.cumsum(np.log1p(log_gains[..., None] * BET_FRACTIONS), axis=-2)
    peak = log_capitals.max(axis=-1)  # subtracted before exp, which would overflow after thousands of wins
    return peak + np.log(np.exp(log_capitals - peak[..., None]).mean(axis=-1))


def find_rejection(differences: Sequence[float], level: float, alpha: float) -> int | None:
    """Return the number of tasks after which the test rejects "the mean is at most `level`"; None if it never does."""
    rejections = np.flatnonzero(compute_log_capital(differences, level) >= -math.log(alpha))
    return int(rejections[0]) + 1 if rejections.size else None


def compute_lower_bound(differences: Sequence[float], alpha: float) -> float:
    """Return the highest level that the test rejects: a lower confidence bound of the mean at any stopping time."""
    low, high = -1.0, 1.0  # bisection, because the capital decreases with the level
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if find_rejection(differences, middle, alpha) is None else (middle, high)
    return low
