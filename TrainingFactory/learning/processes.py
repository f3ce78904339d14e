"""The processes that train one model together, as a learner sees them. Here there is one, and nothing to do;
`sharding.py` has several. All of them have all rows and make the same calls in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from TrainingFactory.data.packing import Batch, Pack


class Processes:
    rank = 0
    count = 1

    def shard(self, model: Any, head: torch.nn.Module | None = None) -> None:
        """Divide the weights of a model, and of the head on it, among the processes."""

    def run(self, model: Any, call: Callable[[], Any]) -> Any:
        """Return what the call makes of this model, with its whole weights at hand. One call for each pack."""
        return call()

    def packed(self, make: Callable[[int], Batch], token_budget: int) -> Batch:
        """Return a batch whose packs have at most so many tokens, or fewer where that makes even shares."""
        return make(token_budget)

    def deal(self, packs: Sequence[Pack]) -> Sequence[Pack]:
        """Return the packs of this process: as many as every other has, some of them without rows."""
        return packs

    def exchange(self, packs: Sequence[Pack], names: Sequence[str]) -> None:
        """Give every process what each found out about its own packs."""

    def total(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the sums over all processes, of which some may lack a figure."""
        return sums

    def agree(self, text: str) -> str:
        """Return what the first process says."""
        return text

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a weight, or what goes with one, as a whole."""
        return tensor

    def share(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole tensor that this process has of `like`."""
        return tensor

    def state_of(self, model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
        """Return whole weights for `save_pretrained`, trained ones but an adapter's in the number format of the model
        as it was given; None: the model has them itself."""
        return None
