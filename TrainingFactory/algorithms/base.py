"""What an algorithm says about itself, with the answers that most of them give."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from TrainingFactory.data.packing import Batch
from TrainingFactory.types import Sample, Trajectory

Total = Callable[[dict[str, float]], dict[str, float]]  # sums over the processes that train together


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

    def prepare(self, batches: Sequence[Batch], step: int, total: Total = dict) -> None: ...

    def evaluated(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics
