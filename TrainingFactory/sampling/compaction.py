"""Moving the running slots of a table to the front, so that steps do not compute unused rows."""

from __future__ import annotations

import numpy as np

from TrainingFactory.sampling.table import SlotTable


def scattered(table: SlotTable) -> list[tuple[int, int]]:
    """Return pairs of slots whose exchange moves the running slots to the front. Return none unless that halves the
    rows of a step."""
    running_slots = np.flatnonzero(table.running)
    count = len(running_slots)
    if table.deterministic or not count or running_slots[-1] + 1 < max(2 * count, 4):
        return []
    high = running_slots[running_slots >= count]
    low = np.flatnonzero(~table.running[:count])
    return list(zip(low.tolist(), high.tolist(), strict=True))


def exchange(table: SlotTable, pairs: list[tuple[int, int]]) -> None:
    low, high = (np.array(side) for side in zip(*pairs, strict=True))
    all_slots, swapped = np.concatenate((low, high)), np.concatenate((high, low))
    table.changes += 1
    table.pages.exchange(low, high, int(table.stored[all_slots].max()))
    for array in (
        table.ids, table.rope, table.logprobs, table.stored, table.lengths, table.pure, table.chunked, table.running,
        table.used, table.limit, table.seed, table.stops, table.temperature, table.top_p, table.top_k,
        table.min_p, table.hashes, table.head, table.mark, table.free,
    ):  # fmt: skip
        array[all_slots] = array[swapped]
    for a, b in pairs:
        if table.snapshots is not None:
            table.snapshots.exchange(a, b)
        table.seats[a], table.seats[b] = table.seats[b], table.seats[a]
        table.requests[a], table.requests[b] = table.requests[b], table.requests[a]
        for slot in (a, b):
            if (session_slot := table.seats[slot]) is not None:
                session_slot.slot = slot
