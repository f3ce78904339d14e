"""A test that may be looked at after every task: whether one model is better than another, by paired differences.

It is a bet against "the mean difference is at most `level`", with the differences d in [-1, 1] of tasks whose order was
fixed before. A share b of the capital is put on each task, which makes 1 + b (d - level) / (1 + level) of it; the
capital is the mean over several b. If the statement is true, the capital is a supermartingale that begins at 1, so that
it ever reaches 1 / alpha with a chance of at most alpha (Ville's inequality), whenever one looks and stops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

BETS = np.linspace(0.05, 0.95, 19)


def log_capital(differences: ArrayLike, level: float = 0.0) -> NDArray[np.float64]:
    """Return the logarithm of the capital after each task; the tasks are the last axis."""
    gains = (np.asarray(differences, dtype=float) - level) / (1 + level)
    made = np.cumsum(np.log1p(gains[..., None] * BETS), axis=-2)
    most = made.max(axis=-1)  # taken out, as thousands of wins are more than a float can hold
    return most + np.log(np.exp(made - most[..., None]).mean(axis=-1))


def proved(differences: Sequence[float], level: float, alpha: float) -> int | None:
    """Return after how many tasks it is proved that the mean is over `level`; None where it is not."""
    reached = np.flatnonzero(log_capital(differences, level) >= -math.log(alpha))
    return int(reached[0]) + 1 if reached.size else None


def lower_bound(differences: Sequence[float], alpha: float) -> float:
    """Return the highest level over which the mean is proved to be: it holds at whatever task one stops."""
    low, high = -1.0, 1.0  # the capital falls with the level
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if proved(differences, middle, alpha) is None else (middle, high)
    return low
