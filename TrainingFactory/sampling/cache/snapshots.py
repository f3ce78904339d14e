"""Stored states of recurrent layers: the current state of every slot, and snapshots of earlier ones.

Keys and values of any prefix can be reused, a state only at the position where it was taken. The rows of the state
cache are the current states of the slots, an unused one for padding, then the snapshots. Slots with a common prefix
share its snapshots.
"""

from __future__ import annotations

import numpy as np

EMPTY_STATE = -1  # source of a copy: the state before the first token


class Snapshots:
    """Snapshots of `num_snapshots` recurrent states. The least recently used one is replaced when all are in use."""

    def __init__(self, num_slots: int, num_snapshots: int) -> None:
        self.num_slots, self.num_snapshots = num_slots, num_snapshots
        self.clear()

    @property
    def num_rows(self) -> int:
        return self.num_slots + 1 + self.num_snapshots

    @property
    def unused_row(self) -> int:
        """Return the row that padding reads and writes."""
        return self.num_slots

    def clear(self) -> None:
        """Drop all snapshots and pending copies."""
        self.rows_at: list[dict[int, int]] = [{} for _ in range(self.num_slots)]  # state's row by position
        # Positions at which prefilling pauses for a snapshot.
        self.stops: list[set[int]] = [set() for _ in range(self.num_slots)]
        self.row_copies: list[tuple[int, int]] = []  # source and target rows, to copy in this order
        self._slots_of: dict[int, set[int]] = {}  # slots of each snapshot, the least recently used one first
        self._free_rows = list(range(self.num_slots + 1, self.num_rows))

    def get_usable(self, lengths: np.ndarray, stored_lengths: np.ndarray) -> np.ndarray:
        """Return the longest prefix of at most `lengths` [slots] tokens after which each slot has a state."""
        usable_lengths = np.where(stored_lengths <= lengths, stored_lengths, 0)
        for slot, rows in enumerate(self.rows_at):
            if rows and lengths[slot] > usable_lengths[slot]:
                positions = [position for position in rows if position <= lengths[slot]]
                usable_lengths[slot] = max(positions, default=0) or usable_lengths[slot]
        return usable_lengths

    def take_snapshot(self, slot: int, position: int) -> int:
        """Take a snapshot of the slot's current state, and return its row."""
        row = self.rows_at[slot].get(position)
        if row is None:
            if not self._free_rows:
                self._evict_snapshot(next(iter(self._slots_of)))
            row = self._free_rows.pop()
            self.row_copies.append((slot, row))
        self._add_reference(slot, position, row)
        return row

    def find_pause(self, slot: int, current_position: int, end: int) -> int:
        """Return the next position after `current_position` at which prefilling pauses for a snapshot of the slot, at
        most `end`."""
        return min([end, *(position for position in self.stops[slot] if position > current_position)])

    def take_due(self, slots: np.ndarray, stored_lengths: np.ndarray, copyable_lengths: np.ndarray) -> None:
        """Take snapshots of slots that reach a planned pause, if other sessions may reuse all tokens before it."""
        for slot in slots.tolist():
            if (position := int(stored_lengths[slot])) in self.stops[slot]:
                self.stops[slot].remove(position)
                if copyable_lengths[slot] == position:
                    self.take_snapshot(slot, position)

    def _add_reference(self, slot: int, position: int, row: int) -> None:
        self.rows_at[slot][position] = row
        self._slots_of[row] = self._slots_of.pop(row, set()) | {slot}  # now the most recently used one

    def _evict_snapshot(self, row: int) -> None:
        for slot in self._slots_of.pop(row):
            rows_at = self.rows_at[slot].items()
            self.rows_at[slot] = {position: other_row for position, other_row in rows_at if other_row != row}
        self._free_rows.append(row)

    def restore(self, slot: int, position: int, current_position: int) -> None:
        """Reset the slot's state from position `current_position` to the earlier `position`, for which `get_usable`
        must have found a state."""
        if position == 0:
            self.drop(slot)
            self.row_copies.append((EMPTY_STATE, slot))
            return
        if position != current_position:
            row = self.rows_at[slot][position]
            self._add_reference(slot, position, row)
            self.row_copies.append((row, slot))
        for key in [key for key in self.rows_at[slot] if key > position]:
            self._remove_reference(slot, key)

    def share(self, source_slot: int, stored_length: int, target_slot: int, position: int) -> None:
        """Give `target_slot` the state of `source_slot` at `position` and the snapshots up to there. The current state
        of `source_slot` is at `stored_length`."""
        self.drop(target_slot)
        if position == 0:
            self.row_copies.append((EMPTY_STATE, target_slot))
            return
        if position == stored_length:
            self.take_snapshot(source_slot, position)
        for earlier_position, row in self.rows_at[source_slot].items():
            if earlier_position <= position:
                self.rows_at[target_slot][earlier_position] = row
                self._slots_of[row].add(target_slot)
        row = self.rows_at[source_slot][position]
        self._add_reference(target_slot, position, row)
        self.row_copies.append((row, target_slot))

    def exchange(self, slot_a: int, slot_b: int) -> None:
        """Exchange the states and the snapshots of two slots."""
        self.row_copies += [(slot_a, self.unused_row), (slot_b, slot_a), (self.unused_row, slot_b)]
        swapped_slots = {slot_a: slot_b, slot_b: slot_a}
        for row in {*self.rows_at[slot_a].values(), *self.rows_at[slot_b].values()}:
            self._slots_of[row] = {swapped_slots.get(slot, slot) for slot in self._slots_of[row]}
        self.rows_at[slot_a], self.rows_at[slot_b] = self.rows_at[slot_b], self.rows_at[slot_a]
        self.stops[slot_a], self.stops[slot_b] = self.stops[slot_b], self.stops[slot_a]

    def drop(self, slot: int) -> None:
        """Forget the slot's snapshots. Snapshots that other slots share stay."""
        self.stops[slot].clear()
        for position in list(self.rows_at[slot]):
            self._remove_reference(slot, position)

    def _remove_reference(self, slot: int, position: int) -> None:
        row = self.rows_at[slot].pop(position)
        self._slots_of[row].discard(slot)
        if not self._slots_of[row]:
            del self._slots_of[row]
            self._free_rows.append(row)
