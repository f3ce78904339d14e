"""Several processes that train one model, each on rows of its own. Started by `accelerate launch` or anything
else that sets its variables there are as many as it says; otherwise there is one, and all of this does nothing.

Gradients are added up once for each step, after all packs of a process: how many packs each has, none among
them, does not matter to the others, and no process waits for a pack that another does not have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, reduce


class Processes:
    def __init__(self, device: torch.device) -> None:
        self._state = PartialState(cpu=device.type == "cpu")

    @property
    def count(self) -> int:
        return self._state.num_processes

    def total(self, figures: dict[str, float]) -> dict[str, float]:
        """The sums over all processes, of which some may lack a figure."""
        if self.count == 1:
            return figures
        sums: dict[str, float] = defaultdict(float)
        for each in gather_object([figures]):
            for name, figure in each.items():
                sums[name] += figure
        return dict(sums)

    def add_gradients(self, weights: Sequence[torch.nn.Parameter]) -> None:
        """Every weight has the sum of its gradients in all processes afterwards."""
        if self.count == 1:
            return
        for weight in weights:
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = reduce(gradient, "sum")  # pyright: ignore[reportAttributeAccessIssue]
