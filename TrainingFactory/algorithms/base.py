"""Base class of the algorithms, and whitening of advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from TrainingFactory.data.packing import Batch, Pack
from TrainingFactory.types import Sample, Trajectory

MIN_DEVIATION = 1e-6  # standard deviation; values that are closer together are equal up to rounding


class BaseAlgorithm:
    """Default implementation of the `Algorithm` protocol. An algorithm overrides the methods in which it differs."""

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


def compute_moments(
    arrays: Sequence[np.ndarray], weights: Sequence[np.ndarray | None] = ()
) -> tuple[float, float]:
    """Return mean and standard deviation over all arrays; both are 0 if the arrays are empty. `weights` has the weights
    of the values for each array; None: all 1."""
    values = np.concatenate([np.zeros(0), *arrays])  # float64
    if not len(values):
        return 0.0, 0.0
    if all(array_weights is None for array_weights in weights):
        return float(values.mean()), float(values.std())
    pairs = zip(arrays, weights, strict=True)
    flat_weights = np.concatenate(
        [np.ones(len(array)) if weight is None else weight.astype(float) for array, weight in pairs]
    )
    mean = np.average(values, weights=flat_weights)
    return float(mean), float(np.sqrt(np.average((values - mean) ** 2, weights=flat_weights)))


def whiten_advantages(packs: Sequence[Pack]) -> None:
    """Normalise the advantages of a step's trained tokens to mean 0 and standard deviation 1, in place."""
    weights = [pack.weights for pack in packs]
    mean, deviation = compute_moments([pack.advantages for pack in packs], weights)
    for pack in packs:
        pack.advantages = ((pack.advantages - mean) / max(deviation, MIN_DEVIATION)).astype(np.float32)
