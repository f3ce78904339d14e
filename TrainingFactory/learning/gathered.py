"""The whole weights of a sharded learner, for an engine in the first process that has a model of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from TrainingFactory.learning.learner import Learner
from TrainingFactory.types import Weights


class Gathered:
    """Publishes in memory: all processes gather each trained weight, and that of the engine takes them from
    `parameters` at its next update. `model` is the engine's, None in other processes."""

    model_folder = dtype = ""
    rank = None

    def __init__(self, learner: Learner, model: Any) -> None:
        self._learner, self.model = learner, model
        self._found: list[torch.Tensor] = []

    @torch.no_grad()
    def publish(self, version: int) -> Weights:
        trained = [param for param in self._learner.model.parameters() if param.requires_grad]
        wholes = map(self._learner.processes.whole, trained)
        self._found = [whole.cpu() for whole in wholes if self.model is not None]
        return Weights(version)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return each weight as it was published, and those that are not trained as the engine has them."""
        found, self._found = iter(self._found), []
        for own in self.model.parameters():
            yield next(found) if own.requires_grad else own

    def close(self) -> None: ...
