"""Supervised fine-tuning (SFT): the mean of -log p over the trained tokens of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from TrainingFactory.algorithms.base import BaseAlgorithm
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.data.samples import AllOrLast, to_samples
from TrainingFactory.types import Sample, Trajectory


@dataclass(slots=True, frozen=True)
class SFT(BaseAlgorithm):
    turns: AllOrLast = "all"  # assistant turns that are trained on

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"lengths"})

    def samples(self, group: Sequence[Trajectory]) -> list[Sample]:
        return [row for trajectory in group for row in to_samples(trajectory, turns=self.turns)]

    def loss(self, tokens: TrainedTokens) -> tuple[torch.Tensor, dict[str, float]]:
        return -tokens.logprobs.sum() / tokens.step_tokens, {}

    def evaluated(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics with the per-token perplexity added."""
        return metrics | {"perplexity": math.exp(metrics["loss"])}
