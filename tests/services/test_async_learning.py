"""Learning with groups that are sampled ahead comes to the same as learning without."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tests.kits.warm import lift


def success(warm: Path, folder: Path, bound: int, seed: int, order: str = "number", steps: int = 20) -> float:
    """Train from the warm start, and return the share of held-out tasks that are done afterwards."""
    folder.mkdir(parents=True)
    _, after, report = lift(
        warm,
        folder,
        training={"max_steps": steps, "seed": seed, "learning_rate": 6e-4},
        sampling={"max_tokens": 24, "deterministic": False, "slots": 64},
        optimization={"async_rollout": bound > 0, "max_staleness": bound, "async_order": order},
    )
    ages = [row["staleness/max"] for row in report.rows if "staleness/max" in row]
    assert (max(ages) == bound) if bound else not ages
    return after


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_bound_reaches_the_same_success(warm: Path, tmp_path: Path) -> None:
    found = {
        bound: [success(warm, tmp_path / f"{bound}-{seed}", bound, seed) for seed in range(5)]
        for bound in range(5)
    }
    for bound, shares in found.items():
        print(f"bound {bound}: {fmean(shares):.3f} {[round(share, 2) for share in shares]}")
    means = [fmean(shares) for shares in found.values()]
    assert min(means) > 0.8 and max(means) - min(means) < 0.08
