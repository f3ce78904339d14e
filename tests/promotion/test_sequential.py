"""The sequential test: its values, and how often it is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from TrainingFactory.promotion.sequential import (
    BET_FRACTIONS,
    compute_log_capital,
    compute_lower_bound,
    find_rejection,
)


def test_capital_by_hand() -> None:
    better, worse = np.mean(1 + BET_FRACTIONS), np.mean((1 + BET_FRACTIONS) * (1 - BET_FRACTIONS))
    assert np.exp(compute_log_capital([1.0, -1.0, 0.0])) == pytest.approx([better, worse, worse])
    # Not worse by 0.2: a tie is a gain of 0.2 / 0.8, and what is lost is all that was put on it.
    assert np.exp(compute_log_capital([0.0, -1.0], -0.2)) == pytest.approx(
        [np.mean(1 + BET_FRACTIONS / 4), np.mean((1 + BET_FRACTIONS / 4) * (1 - BET_FRACTIONS))]
    )


def test_what_is_proved() -> None:
    needed = next(n for n in range(1, 20) if np.mean((1 + BET_FRACTIONS) ** n) >= 20)
    assert find_rejection([1.0] * 20, 0.0, 0.05) == needed == 7
    assert find_rejection([1.0] * (needed - 1), 0.0, 0.05) is None and find_rejection([], 0.0, 0.05) is None
    assert (
        find_rejection([*[1.0] * needed, *[-1.0] * 50], 0.0, 0.05) == needed
    )  # once it is reached it stands
    # Where nothing flips there is no proof of being better, however many tasks; of not being worse there is.
    assert find_rejection([0.0] * 1000, 0.0, 0.05) is None
    assert find_rejection([0.0] * 1000, -0.05, 0.05) == 90 and find_rejection([0.0] * 40, -0.05, 0.05) is None


def test_the_bound_is_where_the_proof_ends() -> None:
    found = [1.0, 0.0, 1.0, 0.5, -1.0] * 20
    low = compute_lower_bound(found, 0.05)
    assert 0.0 < low < np.mean(found)
    assert (
        find_rejection(found, low - 1e-6, 0.05) is not None
        and find_rejection(found, low + 1e-6, 0.05) is None
    )
    assert compute_lower_bound([-1.0] * 50, 0.05) == pytest.approx(-1.0)


@pytest.mark.parametrize("flipping", [0.3, 1.0])
def test_of_2000_promotions_of_equal_models_few_are_made(flipping: float) -> None:
    """Looked at after every one of 100 tasks; a test for one look at the end would promote far more."""
    rng = np.random.default_rng(1)
    drawn = rng.random((2000, 100))
    differences = np.where(drawn < flipping / 2, 1.0, np.where(drawn < flipping, -1.0, 0.0))
    assert np.mean([find_rejection(each, 0.0, 0.05) is not None for each in differences]) <= 0.05
    worse = differences - 0.1 * (rng.random(differences.shape) < 0.5) * (differences > -0.9)
    level = float(worse.mean())  # a model that is worse by just the margin
    assert np.mean([find_rejection(each, level, 0.05) is not None for each in worse]) <= 0.05
    sums = np.cumsum(differences, axis=1)
    naive = sums > 1.645 * np.sqrt(np.cumsum(differences**2, axis=1)) + 1e-9
    assert naive[:, 10:].any(axis=1).mean() > 0.1


def test_a_better_model_is_found_early() -> None:
    drawn = np.random.default_rng(2).random((300, 200))
    differences = np.where(drawn < 0.25, 1.0, np.where(drawn < 0.3, -1.0, 0.0))  # better by 0.2
    found = [find_rejection(each, 0.0, 0.05) for each in differences]
    needed = [each for each in found if each is not None]
    assert len(needed) > 0.99 * len(found) and np.median(needed) < 60
