"""Collective operations of the processes that train one model, as no-ops for a single process; `sharding.py` implements
them for several. Every process holds all rows and makes the same calls in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from TrainingFactory.data.packing import Batch, Pack


class Processes:
    rank = 0
    world_size = 1

    def shard(self, model: Any, head: torch.nn.Module | None = None) -> None:
        """Shard the weights of a model, and of its head, over the processes."""

    def run(self, model: Any, function: Callable[[], Any]) -> Any:
        """Call `function` while the model's sharded weights can be gathered, and return its result. Use one call per
        pack."""
        return function()

    def pack_batch(self, make: Callable[[int], Batch], token_budget: int) -> Batch:
        """Return the batch `make(budget)`. The budget is `token_budget`, or less if that balances the packs better
        between the processes."""
        return make(token_budget)

    def take_local_packs(self, packs: Sequence[Pack]) -> Sequence[Pack]:
        """Return the packs of this process. Every process gets the same number; some packs may have no rows."""
        return packs

    def exchange_fields(self, packs: Sequence[Pack], field_names: Sequence[str]) -> None:
        """Exchange the arrays `field_names` between the processes, so that every process has them for all packs."""

    def sum_metrics(self, metric_sums: dict[str, float]) -> dict[str, float]:
        """Return the sum of each metric over all processes; a process may lack some of the keys."""
        return metric_sums

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """Return the sum of the arrays of all processes, which have equal shapes."""
        return array

    def broadcast_text(self, text: str) -> str:
        """Return the `text` of rank 0 in every process."""
        return text

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a sharded weight, gradient or optimizer state."""
        return tensor

    def take_shard(self, tensor: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
        """Return this process's shard of a full tensor, sharded like `template`."""
        return tensor

    def gather_state(self, model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
        """Return the full weights for `save_pretrained`. Trained weights are cast to `dtype`, except those of an
        adapter. None: the model is not sharded, and its own weights can be saved."""
        return None
