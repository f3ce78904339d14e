"""Compaction of the slot table: running slots move to the front, so that steps compute no unused rows."""

from __future__ import annotations

import numpy as np

from TrainingFactory.sampling.table import SlotTable


def find_exchanges(table: SlotTable) -> list[tuple[int, int]]:
    """Return slot pairs to exchange, so that running slots come first; [] unless that halves the rows of a step."""
    running_slots = np.flatnonzero(table.running)
    count = len(running_slots)
    if table.deterministic or not count or running_slots[-1] + 1 < max(2 * count, 4):
        return []
    high_slots = running_slots[running_slots >= count]
    low_slots = np.flatnonzero(~table.running[:count])
    return list(zip(low_slots.tolist(), high_slots.tolist(), strict=True))


def exchange(table: SlotTable, pairs: list[tuple[int, int]]) -> None:
    low_slots, high_slots = (np.array(slots) for slots in zip(*pairs, strict=True))
    all_slots, swapped = np.concatenate((low_slots, high_slots)), np.concatenate((high_slots, low_slots))
    table.changes += 1
    table.pages.exchange(low_slots, high_slots, int(table.stored[all_slots].max()))
    for array in (
        table.ids, table.rope, table.logprobs, table.stored, table.lengths, table.copyable, table.chunked,
        table.running, table.used, table.limit, table.seed, table.stops, table.temperature, table.top_p, table.top_k,
        table.min_p, table.hashes, table.head, table.mark, table.free,
    ):  # fmt: skip
        array[all_slots] = array[swapped]
    for a, b in pairs:
        if table.snapshots is not None:
            table.snapshots.exchange(a, b)
        table.session_slots[a], table.session_slots[b] = table.session_slots[b], table.session_slots[a]
        table.requests[a], table.requests[b] = table.requests[b], table.requests[a]
        for slot in (a, b):
            if (session_slot := table.session_slots[slot]) is not None:
                session_slot.slot = slot
