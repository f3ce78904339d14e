"""Record the decode step as CUDA graphs, one for each shape: launching the hundreds of small kernels of a small model
one by one takes longer than running them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

ROWS = (16, 64, 128, 256)  # and what 256 divides: unused rows cost less than to record more graphs
SPANS = (8, 4, 2)  # tokens of each row, where rows have more than one to feed
FREE_TOKENS = 128  # a forward of so many takes hardly longer than one of a few: it reads the same weights
Step = Callable[[list[torch.Tensor]], torch.Tensor]


def graph_rows(rows: int, most: int) -> int:
    """Return the next number of rows for which there is to be a graph, so that there are few of them."""
    return min(most, next((size for size in ROWS if size >= rows), -(-rows // 256) * 256))


def graph_span(following: np.ndarray, rows: int, most: int) -> int:
    """Return how many tokens to feed each row, given how many known or guessed ones could follow its next: the most for
    which a third of what is added is of use, or which cost next to nothing; 0: just one."""
    for span in SPANS:
        useful = int(np.minimum(following, span - 1).sum())
        if span <= most and useful and (useful * 3 >= rows * (span - 1) or rows * span <= FREE_TOKENS):
            return span
    return 0


class DecodeGraphs:
    def __init__(self, device: torch.device, state: torch.Tensor) -> None:
        self.device = device
        self.state = state  # what a step changes, which the trial before a recording must not
        self.broken = False  # this model cannot be recorded
        self._state: Hashable = None
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._pool: Any = None
        self.recorded, self.seconds = 0, 0.0  # how many so far, and what they took

    def check(self, model: torch.nn.Module, cache: list[torch.Tensor]) -> None:
        """Forget the graphs, which hold addresses, if weights have moved, adapters were switched or the cache grew."""
        state = (tuple(tensor.data_ptr() for tensor in (*model.parameters(), *cache)), adapter_state(model))
        if state != self._state:
            self._graphs.clear()
            self._pool = None  # it goes with the last graph that used it
            self._state = state

    def run(self, key: Hashable, arrays: list[np.ndarray], step: Step) -> torch.Tensor | None:
        """Run `step` on the arrays, as a graph; None if it cannot be recorded."""
        found = self._graphs.get(key)
        if found is None and not self.broken:
            found = self._record(key, arrays, step)
        if found is None:
            return None
        graph, inputs, result = found
        inputs.copy_(packed(arrays).pin_memory(), non_blocking=True)
        graph.replay()
        return result

    def _record(self, key: Hashable, arrays: list[np.ndarray], step: Step) -> Any:
        started, inputs = time.perf_counter(), packed(arrays).to(self.device)
        tensors = unpacked(inputs, arrays)
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # libraries set themselves up outside the recording
                before = self.state.clone()
                step(tensors)
                self.state.copy_(before)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # A learner in another thread may allocate meanwhile; that is no concern of this recording.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = step(tensors)
        except RuntimeError as error:
            log.warning("decoding without CUDA graphs, because the step cannot be recorded: %s", error)
            self.broken = True
            return None
        self._pool = self._pool or graph.pool()
        self._graphs[key] = (graph, inputs, result)
        self.recorded, self.seconds = self.recorded + 1, self.seconds + time.perf_counter() - started
        return self._graphs[key]


def packed(arrays: list[np.ndarray]) -> torch.Tensor:
    """Return arrays of int64 and float64 as one tensor, for one transfer."""
    return torch.from_numpy(np.concatenate([array.view(np.int64) for array in arrays]))


def unpacked(packed: torch.Tensor, arrays: list[np.ndarray]) -> list[torch.Tensor]:
    kinds = {np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64}
    parts = packed.split([len(array) for array in arrays])
    return [part.view(kinds[array.dtype]) for part, array in zip(parts, arrays, strict=True)]


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Move all in one transfer, which is what small copies to a GPU cost by."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpacked(packed(arrays).to(device), arrays)


def adapter_state(model: torch.nn.Module) -> Hashable:
    """Tell which adapters are in use: PEFT switches them by attributes, which no address shows."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    return tuple((tuple(layer.active_adapters), layer.disable_adapters, layer.merged) for layer in layers)
