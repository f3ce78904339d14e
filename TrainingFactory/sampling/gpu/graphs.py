"""CUDA graphs of the decode step, one per shape: launching the hundreds of small kernels of a small model one by one
takes longer than running them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

ROWS = (16, 64, 128, 256)  # and multiples of 256: unused rows cost less than recording more graphs
SPANS = (8, 4, 2)  # tokens per row, if rows have more than one to feed
CHEAP_TOKENS = 128  # reading the weights takes most of the time of a forward up to this size
RunStep = Callable[[list[torch.Tensor]], torch.Tensor]


def round_up_rows(num_rows: int, max_rows: int) -> int:
    """Round a number of rows up to a size with a CUDA graph, because each size needs a graph."""
    return min(max_rows, next((size for size in ROWS if size >= num_rows), -(-num_rows // 256) * 256))


def choose_row_tokens(following_counts: np.ndarray, rows: int, max_rows: int) -> int:
    """Return the number of tokens to feed per row; 0 means one. `following_counts` [D] is the number of known or draft
    tokens that each row has after its next token. The result is the largest span in which a third of the additional
    tokens is useful, or whose additional tokens cost next to nothing."""
    for span in SPANS:
        useful = int(np.minimum(following_counts, span - 1).sum())
        if span <= max_rows and useful and (useful * 3 >= rows * (span - 1) or rows * span <= CHEAP_TOKENS):
            return span
    return 0


class DecodeGraphs:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.failure_reason = ""  # why the model cannot be recorded
        self._addresses: Hashable = None
        # graph, packed inputs, result
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._memory_pool: Any = None
        self.recorded, self.seconds = 0, 0.0  # recordings so far, and the time they took
        self.replayed = 0  # steps that ran as a graph

    def drop_stale_graphs(self, model: torch.nn.Module, cache: list[torch.Tensor]) -> None:
        """Drop all graphs if weights moved, adapters were switched or the cache grew, because graphs contain memory
        addresses."""
        tensors = (*model.parameters(), *cache)
        addresses = (tuple(tensor.data_ptr() for tensor in tensors), get_active_adapters(model))
        if addresses != self._addresses:
            self._graphs.clear()
            self._memory_pool = None  # the memory pool is released with the last graph that uses it
            self._addresses = addresses

    def run(
        self, key: Hashable, arrays: list[np.ndarray], dummy_arrays: list[np.ndarray], run_step: RunStep
    ) -> torch.Tensor | None:
        """Run `run_step` on the arrays as a graph, recorded on the first call with this key; None if that fails. The
        warm-up before the recording uses `dummy_arrays` of equal sizes, with which the step has no lasting effect."""
        recording = self._graphs.get(key)
        if recording is None and not self.failure_reason:
            recording = self._record(key, arrays, dummy_arrays, run_step)
        if recording is None:
            return None
        graph, inputs, output = recording
        inputs.copy_(pack_arrays(arrays).pin_memory(), non_blocking=True)
        graph.replay()
        self.replayed += 1
        return output

    def _record(self, key: Hashable, arrays: list[np.ndarray], dummy: list[np.ndarray], step: RunStep) -> Any:
        start_time, inputs = time.perf_counter(), pack_arrays(arrays).to(self.device)
        tensors = unpack_arrays(inputs, arrays)
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # warm-up: libraries initialize outside the recording
                step(to_device(dummy, self.device))
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: allocations by a learner in another thread must not fail this recording.
            with torch.cuda.graph(graph, pool=self._memory_pool, capture_error_mode="thread_local"):
                output = step(tensors)
        except RuntimeError as error:
            log.warning("Sampling without CUDA graphs, which is slower: recording the step failed: %s", error)
            self.failure_reason = str(error) or type(error).__name__
            return None
        self._memory_pool = self._memory_pool or graph.pool()
        self._graphs[key] = (graph, inputs, output)
        self.recorded, self.seconds = self.recorded + 1, self.seconds + time.perf_counter() - start_time
        return self._graphs[key]


def pack_arrays(arrays: list[np.ndarray]) -> torch.Tensor:
    """Pack arrays of int64 and float64 into one int64 tensor, for a single transfer."""
    return torch.from_numpy(np.concatenate([array.view(np.int64) for array in arrays]))


def unpack_arrays(packed: torch.Tensor, arrays: list[np.ndarray]) -> list[torch.Tensor]:
    dtypes = {np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64}
    views = packed.split([len(array) for array in arrays])
    return [view.view(dtypes[array.dtype]) for view, array in zip(views, arrays, strict=True)]


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to the device in one transfer, because small copies to a GPU cost the same as large ones."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return unpack_arrays(pack_arrays(arrays).to(device), arrays)


def get_active_adapters(model: torch.nn.Module) -> Hashable:
    """Return which adapters are active. PEFT switches adapters by attributes, so that a comparison of memory addresses
    does not detect it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    return tuple((tuple(layer.active_adapters), layer.disable_adapters, layer.merged) for layer in layers)
