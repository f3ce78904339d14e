"""CUDA graphs on a CPU: the kernels of a step in plain torch, and recordings that run the recorded function again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.cache.attention import StepContext
from TrainingFactory.sampling.cache.pages import PAGE
from TrainingFactory.sampling.cache.store import LayerCache
from TrainingFactory.sampling.gpu.graphs import pack_arrays, unpack_arrays
from TrainingFactory.sampling.picking import pick


class PlainKernels:
    """Does what the GPU's kernels do, token by token: each looks at the keys of its own slot up to its place."""

    @staticmethod
    def attend(
        q: torch.Tensor, layer: LayerCache, step: StepContext, scale: float, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert step.positions is not None and step.cache is not None
        cache, length = step.cache, step.cache.tables[layer.table].shape[1] * PAGE
        slots = {row: row for row in range(step.num_dense)}
        if (
            step.chunk_tiles is not None
            and step.chunk_tiles.members is not None
            and step.chunk_tiles.slots is not None
        ):
            tiles = step.chunk_tiles.members.unflatten(0, (step.chunk_tiles.num_tiles, -1)).tolist()
            pairs = zip(step.chunk_tiles.slots.tolist(), tiles, strict=True)
            slots |= {token: slot for slot, tile in pairs for token in tile if token >= 0}
        out = torch.zeros_like(q)
        for token, slot in slots.items():
            end, window = int(step.positions[token]) + 1, layer.shape.window
            seen = slice(0 if window is None else max(0, end - window), end)
            grouped = q[token].unflatten(0, (layer.keys.shape[2], -1))  # [Hkv, G, d]
            keys, values = (
                cache.gather(layer, states, slice(slot, slot + 1), 0, length)[0, seen]
                for states in (layer.keys, layer.values)
            )
            weights = torch.einsum("hgd,nhd->hgn", grouped, keys) * scale
            out[token] = torch.einsum("hgn,nhd->hgd", weights.softmax(-1), values).flatten(0, 1)
        return out

    sample_tokens = staticmethod(pick)


class ReplayedSteps:
    """Stands in for `DecodeGraphs`: the function that was recorded for a key runs for every step with that key, on the
    buffers of the recording. So everything that changes from step to step must come from the arrays."""

    def __init__(self) -> None:
        self._recordings: dict[Hashable, tuple[Any, torch.Tensor, list[torch.Tensor]]] = {}
        self.recorded, self.replayed = 0, 0
        self.changed = list[str]()  # what a warm-up changed
        self.watched: Callable[[], list[torch.Tensor]] = list

    def drop_stale_graphs(self, model: torch.nn.Module, cache: list[torch.Tensor]) -> None:
        self._recordings.clear()

    def run(
        self, key: Hashable, arrays: list[np.ndarray], dry: list[np.ndarray], step: Any
    ) -> torch.Tensor | None:
        if key not in self._recordings:
            before = [tensor.clone() for tensor in self.watched()]
            step(unpack_arrays(pack_arrays(dry), dry))
            after = zip(before, self.watched(), strict=True)
            self.changed += [str(key) for old, new in after if not torch.equal(old, new)]
            buffer = pack_arrays(arrays)
            self._recordings[key] = step, buffer, unpack_arrays(buffer, arrays)
            self.recorded += 1
        recorded_step, buffer, tensors = self._recordings[key]
        buffer.copy_(pack_arrays(arrays))
        self.replayed += 1
        return recorded_step(tensors)


def with_plain_kernels(model: Any, slots: int, **options: Any) -> NativeEngine:
    """Return an engine that plans and runs its steps as on a GPU, with plain kernels."""
    settings: dict[str, Any] = {"max_length": 256, "max_guesses": 0} | options
    engine = NativeEngine(model, slots=slots, **settings)
    runner, planner = engine._runner, engine._planner
    runner._kernels, runner.launches_ahead, planner.tiled, planner.few_shapes = PlainKernels, True, True, True
    runner.refresh = lambda: None  # which is for weights that the kernels read
    return engine


def with_replays(engine: NativeEngine) -> ReplayedSteps:
    """Let an engine on a CPU replay its decoding steps. A warm-up may change only keys, values and unused rows."""
    replays: Any = ReplayedSteps()
    runner, slots = engine._runner, engine._table.num_slots

    def watched() -> list[torch.Tensor]:
        states = runner.states.cache.tensors if runner.states.cache is not None else []
        used = [tensor for state in states for tensor in (state[:slots], state[slots + 1 :])]
        return [*used, runner._latest_tokens[:slots], runner._has_ended[:slots]]

    replays.watched = watched
    runner._graphs, engine._planner.few_shapes = replays, True
    return replays
