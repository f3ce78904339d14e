"""Supervised fine-tuning: the mean of -log p over the trained tokens of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from TrainingFactory.algorithms.trained import Trained
from TrainingFactory.data.packing import Batch
from TrainingFactory.data.samples import to_samples
from TrainingFactory.types import Sample, Trajectory


@dataclass(slots=True, frozen=True)
class SFT:
    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        return [row for trajectory in group for row in to_samples(trajectory)]

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def loss(self, trained: Trained) -> tuple[torch.Tensor, dict[str, float]]:
        return -trained.logprobs.sum() / trained.step_tokens, {}
