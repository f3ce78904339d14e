"""Compaction of the slot table: running slots move to the front, so that steps compute no unused rows."""

from __future__ import annotations

import numpy as np

from TrainingFactory.sampling.table import SlotTable


def find_exchanges(table: SlotTable) -> list[tuple[int, int]]:
    """Return slot pairs to exchange, so that running slots come first; [] unless that halves the rows of a step."""
    running_slots = np.flatnonzero(table.running)
    num_running = len(running_slots)
    if table.deterministic or not num_running or running_slots[-1] + 1 < max(2 * num_running, 4):
        return []
    high_slots = running_slots[running_slots >= num_running]
    low_slots = np.flatnonzero(~table.running[:num_running])
    return list(zip(low_slots.tolist(), high_slots.tolist(), strict=True))


def exchange_slots(table: SlotTable, slot_pairs: list[tuple[int, int]]) -> None:
    low_slots, high_slots = (np.array(slots) for slots in zip(*slot_pairs, strict=True))
    all_slots, partners = np.concatenate((low_slots, high_slots)), np.concatenate((high_slots, low_slots))
    table.num_changes += 1
    table.pages.exchange(low_slots, high_slots, int(table.stored[all_slots].max()))
    for slot_array in (
        table.ids, table.rope, table.logprobs, table.stored, table.lengths, table.copyable, table.chunked,
        table.running, table.used, table.limit, table.seed, table.stops, table.temperature, table.top_p, table.top_k,
        table.min_p, table.hashes, table.head, table.prompt_hashes, table.free,
    ):  # fmt: skip
        slot_array[all_slots] = slot_array[partners]
    for i, j in slot_pairs:
        if table.snapshots is not None:
            table.snapshots.exchange(i, j)
        table.session_slots[i], table.session_slots[j] = table.session_slots[j], table.session_slots[i]
        table.requests[i], table.requests[j] = table.requests[j], table.requests[i]
        for slot in (i, j):
            if (session_slot := table.session_slots[slot]) is not None:
                session_slot.slot = slot
