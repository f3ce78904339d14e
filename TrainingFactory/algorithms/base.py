"""What an algorithm says about itself, with the answers that most of them give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from TrainingFactory.data.packing import Batch, Pack
from TrainingFactory.types import Sample, Trajectory

SMALLEST = 1e-6  # deviation; numbers that are closer together than that are the same but for rounding


class BaseAlgorithm:
    """Answers for an algorithm that needs nothing special; each overrides what is different."""

    refill: int = 0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def adjusted(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        return list(group)

    def accepted(self, group: Sequence[Trajectory]) -> list[Trajectory] | None:
        return None

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        raise NotImplementedError

    def prepare(self, batches: Sequence[Batch], step: int) -> None: ...

    def evaluated(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics


def moments(arrays: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return mean and deviation of all numbers in the arrays; 0 where there are none."""
    every = np.concatenate([np.zeros(0), *arrays])  # float64
    return (float(every.mean()), float(every.std())) if len(every) else (0.0, 0.0)


def whiten(packs: Sequence[Pack]) -> None:
    """Give the advantages of all trained tokens of a step mean 0 and deviation 1."""
    mean, deviation = moments([pack.advantages for pack in packs])
    for pack in packs:
        pack.advantages = ((pack.advantages - mean) / max(deviation, SMALLEST)).astype(np.float32)
