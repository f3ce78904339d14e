"""One forward: from the table's arrays to tensors, through the model, back to tokens and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.sampling.graphs import DecodeGraphs
from TrainingFactory.sampling.picking import Filters, pick, uniforms
from TrainingFactory.sampling.slots import ATTENTION, Chunks, Shape, SlotCache, StepContext
from TrainingFactory.sampling.table import SlotTable
from TrainingFactory.sampling.view import check_model, refuse, shared_view

NONE = np.zeros(0, np.int64)
CHUNK = 32  # deterministic mode: tokens of one prefill forward, at multiples of it


@dataclass(slots=True)
class Plan:
    """What one forward feeds. Slot i of the dense part is row i."""

    dense: np.ndarray  # slots that feed one token each
    rows: int = 0  # R, dense rows with the unused ones among them
    slots: np.ndarray = field(default_factory=lambda: NONE)  # [P] slots that feed a chunk, in order
    counts: np.ndarray = field(default_factory=lambda: NONE)  # [P] tokens of each chunk


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


class Runner:
    """Owns the view of the model and the cache; runs under inference mode, in whichever thread calls it."""

    def __init__(self, model: PreTrainedModel, table: SlotTable) -> None:
        check_model(model)
        self.model, self.table = model, table
        self.refresh()
        embeddings: Any = model.get_input_embeddings()
        self.vocabulary: int = embeddings.num_embeddings
        self.device: torch.device = embeddings.weight.device
        self.kind = model.config.model_type
        self.shapes = self._shapes()
        self.dtype = self.shapes[0].dtype
        self.full = round_up(table.max_length, 64)
        self.cache: SlotCache | None = None
        self._span = torch.arange(max(self.full, 64), device=self.device)
        self._seen = torch.zeros((), dtype=self.dtype, device=self.device)
        self._hidden = torch.full((), -torch.inf, dtype=self.dtype, device=self.device)
        same_sizes = all(shape.key_size == shape.value_size for shape in self.shapes)
        self._fused = same_sizes and self.device.type == "cpu"  # the CPU's fused kernel takes these layers
        self._trunk, self._trunk_key = 0, (0, b"")
        self._graphs = DecodeGraphs(self.device) if self.device.type == "cuda" else None
        self._compare()

    def refresh(self) -> None:
        """Look at the model anew: its adapters may have been switched, its modules replaced."""
        self.view = shared_view(self.model, ATTENTION)
        self._moved = True  # what CUDA graphs point to may be elsewhere now

    @torch.inference_mode()
    def _shapes(self) -> list[Shape]:
        """Run two tokens through the model to learn the shapes of its layers; refuses what it cannot do."""
        step = StepContext()
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        self.view(input_ids=ids, position_ids=ids, use_cache=False, tfactory_step=step)
        layers = self.model.config.get_text_config().num_hidden_layers
        if len(step.shapes) != layers:
            raise refuse(self.kind, f"{len(step.shapes)} of its {layers} layers use the attention interface")
        return step.shapes

    @torch.inference_mode()
    def _compare(self) -> None:
        """Eight tokens through our attention, seven as a chunk and one as a dense row, and through the
        model's own. One that does something with attention that we do not know of is refused here."""
        ids = torch.arange(8, device=self.device)[None] % self.vocabulary
        expected = shared_view(self.model, "eager")(input_ids=ids, use_cache=False).logits[0].float()
        cache, positions = SlotCache(1, 64, self.shapes), self._span[:8]
        chunk = Chunks(slice(0, 1), self._mask(positions[None, :7], 64), 64)
        steps = (
            StepContext(cache, positions[:7], chunks=chunk),
            StepContext(cache, positions[7:], rows=1, mask=self._mask(positions[None, 7:], 64), width=64),
        )
        inputs = zip(ids.split((7, 1), 1), positions[None].split((7, 1), 1), steps, strict=True)
        parts = [
            self.view(input_ids=part, position_ids=at, use_cache=False, tfactory_step=step).logits[0]
            for part, at, step in inputs
        ]
        off = (torch.cat(parts).float() - expected).abs().mean() / expected.std().clamp(min=1e-6)
        if not off < (0.01 if self.dtype == torch.float32 else 0.1):
            raise refuse(self.kind, f"its logits through the slot cache are off by {off:.1%} of their spread")

    # -- cache

    def reserve(self, length: int) -> SlotCache:
        """The cache, with room for sequences of this length. Grows by doubling."""
        length = min(round_up(length, 128), self.full)
        if self.cache is None or length > self.cache.capacity:
            self._moved = True
        if self.cache is None:
            start = self.full if self.table.deterministic else min(self.full, max(512, length))
            self.cache = SlotCache(self.table.slots, start, self.shapes)
        if length > self.cache.capacity:
            self.cache.grow(min(self.full, max(length, 2 * self.cache.capacity)))
        return self.cache

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        """Keys and values from the first to the second slot of each pair; all read before any is written."""
        cache = self.reserve(length)
        sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
        cache.copy(sources, targets, min(round_up(length, 64), cache.capacity))

    def width(self, length: int) -> int:
        """How many cached positions attention looks at. In deterministic mode this must not change what comes
        out: the CPU kernel works in blocks of 512 keys, and blocks that are masked whole add exact zeros."""
        if not self.table.deterministic:
            # few widths on a GPU, because each has its graph
            return min(round_up(length, 128 if self.device.type == "cuda" else 64), self.full)
        return min(round_up(length, 512), self.full) if self._fused else self.full

    def trunk(self, dense: np.ndarray) -> int:
        """How many leading positions the dense rows have in common, where it pays to read them once. Not in
        deterministic mode, where nothing may depend on who else is there."""
        if len(dense) < 4 or self.table.deterministic or not self._fused:
            return 0
        key = (self.table.changes, dense.tobytes())
        if key != self._trunk_key:
            common = self.table.trunk(dense) // 32 * 32
            self._trunk_key, self._trunk = key, common if common >= 64 else 0
        return self._trunk

    # -- one forward

    @torch.inference_mode()
    def run(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Feed what the plan says; (slots, tokens, log-probs) of the rows that came to a new token. The
        table's `stored` counts are moved on; the new tokens are the caller's to enter."""
        table = self.table
        stored = table.stored
        dense_end = int(stored[plan.dense].max()) + 1 if len(plan.dense) else 0
        chunk_end = int((stored[plan.slots] + plan.counts).max()) if len(plan.slots) else 0
        cache = self.reserve(max(dense_end, chunk_end))
        rows, live, keep = self._new_tokens(plan)  # [M] slots of the logit rows
        trunk = self.trunk(plan.dense)
        arrays = [*self._flat(plan, cache, trunk), keep, uniforms(table.seed[rows], table.known[rows])]
        arrays += self._padding(plan) + self._limits(rows[live], rows)
        if self._graphs is not None and not len(plan.slots) and len(arrays) <= 8:
            picked = self._replay(plan, cache, arrays, self.width(dense_end))
            if picked is not None:
                table.advance(plan.dense, 1)
                return _chosen(picked, rows, live)
        tensors = to_device(arrays, self.device)
        ids, positions, where, index, draws = tensors[:5]
        step = StepContext(cache=cache, where=where, rows=plan.rows, width=self.width(dense_end))
        if plan.rows:
            step.mask = self._mask(positions[: plan.rows, None], step.width)
            step.trunk, step.trunk_slot = trunk, int(plan.dense[0])
        if len(plan.slots):
            step.chunks = self._chunks(plan, positions, tensors[5:7], self.width(chunk_end))
        logits = self.view(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, tfactory_step=step,
            logits_to_keep=index if len(plan.slots) else 0,
        ).logits[0]  # [M, V]  # fmt: skip
        table.advance(plan.dense, 1)
        if len(plan.slots):
            table.advance(plan.slots, plan.counts)
        if not live.any():
            return rows[live], rows[live], np.zeros(0)
        limits = tensors[7:]
        filters = Filters(*limits[1:]) if len(limits) > 1 else None
        return _chosen(pick(logits, draws, limits[0] if limits else None, filters), rows, live)

    def _replay(
        self, plan: Plan, cache: SlotCache, arrays: list[np.ndarray], width: int
    ) -> torch.Tensor | None:
        """The step of a plan that only decodes, as a CUDA graph; None where that cannot be."""
        assert self._graphs is not None

        def step(tensors: list[torch.Tensor]) -> torch.Tensor:
            ids, positions, where, _, draws, *limits = tensors
            mask = self._mask(positions[:, None], width)
            context = StepContext(cache=cache, where=where, rows=plan.rows, width=width, mask=mask)
            logits = self.view(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, tfactory_step=context
            ).logits[0]
            return pick(logits, draws, limits[0] if limits else None)

        if self._moved:
            self._graphs.check(self.model, [layer.keys for layer in cache.layers])
            self._moved = False
        arrays = [*arrays[:5], *arrays[7:]]  # nothing is padded
        return self._graphs.run((plan.rows, width, len(arrays)), arrays, step)

    def _new_tokens(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each row of logits its slot, whether it comes to a new token, and the flat token it is of."""
        table, rows = self.table, np.arange(plan.rows)
        live = np.zeros(plan.rows, bool)
        live[plan.dense] = table.stored[plan.dense] + 1 == table.known[plan.dense]
        if not len(plan.slots):
            return rows, live, rows
        done = np.flatnonzero(table.stored[plan.slots] + plan.counts == table.known[plan.slots])
        rows = np.concatenate((rows, plan.slots[done]))
        live = np.concatenate((live, np.ones(len(done), bool)))
        keep = np.concatenate((np.arange(plan.rows), plan.rows + plan.counts.cumsum()[done] - 1))
        return rows, live, keep

    def _flat(self, plan: Plan, cache: SlotCache, trunk: int) -> list[np.ndarray]:
        """Tokens, positions and cache places, [N] each. Unused places feed token 0, right behind the trunk,
        to the scratch slot, and look at whatever is there: they cost time and touch nothing."""
        table, capacity = self.table, cache.capacity
        size = plan.rows + (CHUNK if table.deterministic and len(plan.slots) else int(plan.counts.sum()))
        tokens, positions = np.zeros(size, np.int64), np.full(size, trunk)
        where = np.full(size, cache.slots * capacity)
        at = table.stored[plan.dense]
        tokens[plan.dense] = table.ids[plan.dense, at]
        positions[plan.dense] = at
        where[plan.dense] = plan.dense * capacity + at
        start = plan.rows
        for slot, count in zip(plan.slots.tolist(), plan.counts.tolist(), strict=True):
            first = int(table.stored[slot])
            if table.deterministic:
                start = first % CHUNK
            part = slice(start, start + count)
            tokens[part] = table.ids[slot, first : first + count]
            positions[part] = np.arange(first, first + count)
            where[part] = positions[part] + slot * capacity
            start += count
        return [tokens, positions, where]

    @staticmethod
    def _padding(plan: Plan) -> list[np.ndarray]:
        """Which chunk token fills each place of [P, T], and which place each chunk token fills."""
        if len(plan.slots) < 2:
            return [NONE, NONE]
        columns = np.arange(plan.counts.max())
        starts = plan.counts.cumsum() - plan.counts
        pad = starts[:, None] + np.minimum(columns, plan.counts[:, None] - 1)
        return [pad.ravel(), np.flatnonzero(columns < plan.counts[:, None])]

    def _chunks(self, plan: Plan, positions: torch.Tensor, padding: list[torch.Tensor], width: int) -> Chunks:
        positions, count = positions[plan.rows :], len(plan.slots)
        first, last = int(plan.slots[0]), int(plan.slots[-1])
        side_by_side = last - first + 1 == count  # then their keys need no copy
        slots = slice(first, last + 1) if side_by_side else torch.from_numpy(plan.slots).to(self.device)
        if count == 1:
            return Chunks(slots, self._mask(positions[None], width), width)
        pad, unpad = padding
        padded = positions[pad].unflatten(0, (count, -1))
        return Chunks(slots, self._mask(padded, width), width, pad, unpad)

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Positions [rows, T] -> additive [rows, 1, T, width]: a token sees what is not after it."""
        hidden = self._span[:width] > positions[:, None, :, None]
        return torch.where(hidden, self._hidden, self._seen)

    def _limits(self, live: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Temperature, top-p, top-k and min-p of the rows, as far as one that counts has them set."""
        table = self.table
        filters = (table.top_p[live] < 1).any() or table.top_k[live].any() or table.min_p[live].any()
        if not filters and (table.temperature[live] == 1).all():
            return []
        arrays = [table.temperature, table.top_p, table.top_k, table.min_p]
        return [array[rows] for array in (arrays if filters else arrays[:1])]


def _chosen(
    picked: torch.Tensor, rows: np.ndarray, live: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slots, tokens, log-probs) of the rows that came to a new token."""
    tokens, logprobs = picked.cpu().numpy()[:, live]
    if not np.isfinite(logprobs).all():
        raise FloatingPointError("the model gave NaN or infinite logits; there is nothing to sample")
    return rows[live], tokens.astype(np.int64), logprobs


def to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """All in one transfer, which is what small copies to a GPU cost by. int64 and float64 only."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.from_numpy(np.concatenate([array.view(np.int64) for array in arrays])).to(device)
    kinds = {np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64}
    parts = packed.split([len(array) for array in arrays])
    return [part.view(kinds[array.dtype]) for part, array in zip(parts, arrays, strict=True)]
