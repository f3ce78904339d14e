"""Layout of a forward for the GPU kernels, in recurring shapes: which tokens attend to which slot's keys."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from TrainingFactory.sampling.cache.attention import StepContext, Tiles
from TrainingFactory.sampling.planning import EMPTY, PIECES, StepPlan
from TrainingFactory.sampling.table import SlotTable

MIN_SAVED_SHARE = 0.5  # smallest fraction of key reads that groups must save,
MIN_SAVED_TOKENS = 32_768  # or smallest number of tokens whose keys are read once less in a step
MIN_SHARED_PREFIX = 64  # shortest shared prefix of a group, in tokens
QUERIES = 64  # query heads of a tile, independent of group sizes, because graphs are recorded for few shapes


class TileArrays(NamedTuple):
    """The arrays of `Tiles`, in the order of its fields."""

    members: np.ndarray  # [count, tokens], or flattened
    slots: np.ndarray  # [count]
    ends: np.ndarray  # [count]


@dataclass(slots=True)
class TileLayout:
    """Tiles of a forward as arrays, with the sizes that a CUDA graph fixes."""

    chunk_tokens: int  # chunk tokens, including padding
    num_chunk_tiles: int  # tiles of the chunks
    num_group_tiles: int  # tiles of rows that share a prefix; 0: every row reads all of its keys
    tokens: int  # of a tile of chunks or groups
    arrays: list[np.ndarray]
    is_recorded: bool = True  # these shapes recur, so that a graph is worth recording

    @property
    def graph_key(self) -> tuple[int, ...]:
        return self.chunk_tokens, self.num_chunk_tiles, self.num_group_tiles

    def assign_tensors(self, step: StepContext, plan: StepPlan, tensors: list[torch.Tensor]) -> None:
        """Set the tiles of `step` from `tensors`, the device copies of `arrays`."""
        tensor_iterator = iter(tensors)
        if plan.rows:
            step.row_tiles = Tiles(plan.span or 1, plan.rows)
        num_arrays = len(TileArrays._fields)
        if self.num_chunk_tiles:
            step.chunk_tiles = Tiles(self.tokens, self.num_chunk_tiles, *islice(tensor_iterator, num_arrays))
        if self.num_group_tiles and step.row_tiles is not None:
            step.group_tiles = Tiles(self.tokens, self.num_group_tiles, *islice(tensor_iterator, num_arrays))
            step.row_tiles.begins = next(tensor_iterator)


def plan_tiles(plan: StepPlan, table: SlotTable, num_heads: int) -> TileLayout:
    """Return the layout of a plan. `num_heads` is the number of query heads per key head."""
    tile_tokens, num_dense_tokens = max(1, QUERIES // num_heads), plan.rows * (plan.span or 1)
    layout = TileLayout(int(plan.counts.sum()), 0, 0, tile_tokens, [])
    if len(plan.slots):
        chunk_tiles = _make_chunk_tiles(plan, num_dense_tokens, tile_tokens)
        layout.num_chunk_tiles = len(chunk_tiles.slots)
        max_tokens = 2 * max(layout.chunk_tokens, PIECES[1])  # larger sizes would waste too much on padding
        sizes = [size for size in PIECES if layout.chunk_tokens <= size < max_tokens]
        usable_sizes = [size for size in sizes if layout.num_chunk_tiles <= size // 8]
        if table.snapshots is not None:  # recurrent layers prefill each length by itself
            usable_sizes = []
        if usable_sizes:
            layout.chunk_tokens, layout.num_chunk_tiles = usable_sizes[0], usable_sizes[0] // 8
        layout.is_recorded = bool(usable_sizes)
        layout.arrays += _pad_tiles(chunk_tiles, layout.num_chunk_tiles, tile_tokens)
    if not plan.span and len(plan.dense) > 3:
        group_tiles, key_starts = _make_group_tiles(plan, table, tile_tokens)
        if group_tiles is not None:
            layout.num_group_tiles = plan.rows // 2
            layout.arrays += [*_pad_tiles(group_tiles, layout.num_group_tiles, tile_tokens), key_starts]
    return layout


def pad_to(array: np.ndarray, size: int, fill_value: int = 0) -> np.ndarray:
    """Return the array padded to a size; ten times as fast as np.pad."""
    padded_array = np.full(size, fill_value, array.dtype)
    padded_array[: len(array)] = array
    return padded_array


def _pad_tiles(tiles: TileArrays, num_tiles: int, tile_tokens: int) -> TileArrays:
    members = pad_to(tiles.members.ravel(), num_tiles * tile_tokens, -1)
    return TileArrays(members, pad_to(tiles.slots, num_tiles), pad_to(tiles.ends, num_tiles))


def _make_chunk_tiles(plan: StepPlan, first_token: int, tile_tokens: int) -> TileArrays:
    """Return tiles of the chunks, whose tokens are consecutive from `first_token` on."""
    token_counts, tiles = plan.counts, -(-plan.counts // tile_tokens)
    chunk_index = np.repeat(np.arange(len(token_counts)), tiles)
    starts = (np.arange(len(chunk_index)) - np.repeat(tiles.cumsum() - tiles, tiles)) * tile_tokens
    columns = np.arange(tile_tokens)
    members = (first_token + (token_counts.cumsum() - token_counts)[chunk_index] + starts)[:, None] + columns
    members[columns >= (token_counts[chunk_index] - starts)[:, None]] = -1
    return TileArrays(members, plan.slots[chunk_index], np.full(len(chunk_index), 1 << 30))


def _make_group_tiles(plan: StepPlan, table: SlotTable, tokens: int) -> tuple[TileArrays | None, np.ndarray]:
    """Return the tiles in which groups of rows attend to their shared prefix (None if they save too little), and the
    position at which the unshared keys of each row begin."""
    dense = plan.dense
    rows = dense[(table.head[dense] >= MIN_SHARED_PREFIX) & (table.stored[dense] >= table.head[dense])]
    rows = rows[table.prompt_hashes[rows].argsort(kind="stable")]
    _, first_indices, counts = np.unique(table.prompt_hashes[rows], return_index=True, return_counts=True)
    offsets = np.arange(len(rows)) - np.repeat(first_indices, counts)
    is_shared = np.repeat(counts, counts) > 1
    rows, offsets = rows[is_shared], offsets[is_shared] % tokens
    tile_index = (offsets == 0).cumsum() - 1
    leaders = rows[offsets == 0]
    saved_tokens = table.head[rows].sum() - table.head[leaders].sum()
    min_saved = min(MIN_SAVED_SHARE * table.stored[dense].sum(), MIN_SAVED_TOKENS)
    if saved_tokens < min_saved or len(leaders) > plan.rows // 2:
        return None, EMPTY
    members = np.full((len(leaders), tokens), -1)
    members[tile_index, offsets] = rows
    key_starts = np.zeros(plan.rows, np.int64)
    key_starts[rows] = table.head[rows]
    return TileArrays(members, leaders, table.head[leaders]), key_starts
