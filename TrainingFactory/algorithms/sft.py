"""Supervised fine-tuning: the mean of -log p over the trained tokens of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from TrainingFactory.algorithms.trained import Trained
from TrainingFactory.data.packing import Batch
from TrainingFactory.data.samples import Which, to_samples
from TrainingFactory.types import Sample, Trajectory


@dataclass(slots=True, frozen=True)
class SFT:
    turns: Which = "all"  # which of the assistant's are learned

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        return [row for trajectory in group for row in to_samples(trajectory, turns=self.turns)]

    def prepare(self, batches: Sequence[Batch], step: int) -> None: ...

    def loss(self, trained: Trained) -> tuple[torch.Tensor, dict[str, float]]:
        return -trained.logprobs.sum() / trained.step_tokens, {}
