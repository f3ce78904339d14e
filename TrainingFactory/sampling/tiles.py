"""Layout of a forward for the GPU kernels, in recurring shapes: which tokens attend to which slot's keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from TrainingFactory.sampling.cache.slots import StepContext, Tiles
from TrainingFactory.sampling.planning import PIECES, Plan
from TrainingFactory.sampling.table import SlotTable

WORTH = 0.5  # smallest fraction of key reads that groups must save
SHORT = 64  # shortest shared prefix of a group, in tokens
QUERIES = 64  # query heads of a tile, independent of group sizes, because graphs are recorded for few shapes


@dataclass(slots=True)
class Layout:
    """The tiles as arrays, and the sizes that a CUDA graph fixes."""

    extra: int  # chunk tokens, including padding
    pieces: int  # tiles of the chunks
    groups: int  # tiles of rows that share a prefix; 0: every row reads all of its keys
    tokens: int  # of a tile of chunks or groups
    arrays: list[np.ndarray]
    recorded: bool = True  # these shapes recur, so that a graph is worth recording

    @property
    def key(self) -> tuple[int, ...]:
        return self.extra, self.pieces, self.groups

    def enter(self, step: StepContext, plan: Plan, tensors: list[torch.Tensor]) -> None:
        """Tell the step's kernel what `arrays` say, which are on the device now."""
        rest = iter(tensors)
        if plan.rows:
            step.rows = Tiles(plan.span or 1, plan.rows)
        if self.pieces:
            step.pieces = Tiles(self.tokens, self.pieces, next(rest), next(rest), next(rest))
        if self.groups and step.rows is not None:
            step.groups = Tiles(self.tokens, self.groups, next(rest), next(rest), next(rest))
            step.rows.begins = next(rest)


def lay_out(plan: Plan, table: SlotTable, heads: int) -> Layout:
    """Return the layout of a plan. `heads` is the number of query heads per key head."""
    tokens, dense = max(1, QUERIES // heads), plan.rows * (plan.span or 1)
    layout = Layout(int(plan.counts.sum()), 0, 0, tokens, [])
    if len(plan.slots):
        arrays = _pieces(plan, dense, tokens)
        layout.pieces = len(arrays[1])
        most = 2 * max(layout.extra, PIECES[1])  # larger sizes would waste too much on padding
        sizes = [size for size in PIECES if layout.extra <= size < most]
        fitting = [size for size in sizes if layout.pieces <= size // 8]
        if fitting:
            layout.extra, layout.pieces = fitting[0], fitting[0] // 8
        layout.recorded = bool(fitting)
        layout.arrays += _padded(arrays, layout.pieces, tokens)
    if not plan.span and len(plan.dense) > 3:
        found = _groups(plan, table, tokens)
        if found is not None:
            layout.groups = plan.rows // 2
            layout.arrays += [*_padded(found[:3], layout.groups, tokens), found[3]]
    return layout


def filled(array: np.ndarray, size: int, value: int = 0) -> np.ndarray:
    """Return the array padded to a size; ten times as fast as np.pad."""
    longer = np.full(size, value, array.dtype)
    longer[: len(array)] = array
    return longer


def _padded(arrays: list[np.ndarray], count: int, tokens: int) -> list[np.ndarray]:
    members, slots, ends = arrays
    return [filled(members.ravel(), count * tokens, -1), filled(slots, count), filled(ends, count)]


def _pieces(plan: Plan, start: int, tokens: int) -> list[np.ndarray]:
    """Return members, slots and ends of tiles for the chunks, whose tokens follow each other from `start` on."""
    counts, tiles = plan.counts, -(-plan.counts // tokens)
    chunk = np.repeat(np.arange(len(counts)), tiles)
    before = (np.arange(len(chunk)) - np.repeat(tiles.cumsum() - tiles, tiles)) * tokens
    column = np.arange(tokens)
    members = (start + (counts.cumsum() - counts)[chunk] + before)[:, None] + column
    members[column >= (counts[chunk] - before)[:, None]] = -1
    return [members, plan.slots[chunk], np.full(len(chunk), 1 << 30)]


def _groups(plan: Plan, table: SlotTable, tokens: int) -> list[np.ndarray] | None:
    """Return members, slots and ends of tiles of rows whose prompts began alike, and where the own keys of each row
    begin; None where that saves too little."""
    dense = plan.dense
    rows = dense[(table.head[dense] >= SHORT) & (table.stored[dense] >= table.head[dense])]
    rows = rows[table.mark[rows].argsort(kind="stable")]
    _, first, counts = np.unique(table.mark[rows], return_index=True, return_counts=True)
    place = np.arange(len(rows)) - np.repeat(first, counts)
    keep = np.repeat(counts, counts) > 1
    rows, place = rows[keep], place[keep] % tokens
    tile = (place == 0).cumsum() - 1
    leaders = rows[place == 0]
    saved = table.head[rows].sum() - table.head[leaders].sum()
    if saved < WORTH * table.stored[dense].sum() or len(leaders) > plan.rows // 2:
        return None
    members = np.full((len(leaders), tokens), -1)
    members[tile, place] = rows
    begins = np.zeros(plan.rows, np.int64)
    begins[rows] = table.head[rows]
    return [members, leaders, table.head[leaders], begins]
