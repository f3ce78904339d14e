"""Stored states of recurrent layers: the current state of every slot, and snapshots of earlier ones.

Keys and values of any prefix can be reused, a state only at the position where it was taken. The rows of the state
cache are the current states of the slots, an unused one for padding, then the snapshots. Slots with a common prefix
share its snapshots.
"""

from __future__ import annotations

import numpy as np

EMPTY_STATE = -1  # source of a copy: the state before the first token


class Snapshots:
    """Snapshots of `count` recurrent states. The least recently used one is replaced when all are in use."""

    def __init__(self, slots: int, count: int) -> None:
        self.slots, self.count = slots, count
        self.clear()

    @property
    def rows(self) -> int:
        return self.slots + 1 + self.count

    @property
    def unused(self) -> int:
        """Return the row that padding reads and writes."""
        return self.slots

    def clear(self) -> None:
        """Drop all snapshots and pending copies."""
        self.rows_at: list[dict[int, int]] = [{} for _ in range(self.slots)]  # state's row by position
        self.stops: list[set[int]] = [
            set() for _ in range(self.slots)
        ]  # where prefilling pauses for a snapshot
        self.copies: list[tuple[int, int]] = []  # source and target rows, to copy in this order
        self._slots_of: dict[int, set[int]] = {}  # slots of each snapshot, the least recently used one first
        self._free = list(range(self.slots + 1, self.rows))

    def usable(self, lengths: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """Return the longest prefix of at most `lengths` [slots] tokens after which each slot has a state."""
        usable = np.where(stored <= lengths, stored, 0)
        for slot, rows in enumerate(self.rows_at):
            if rows and lengths[slot] > usable[slot]:
                positions = [position for position in rows if position <= lengths[slot]]
                usable[slot] = max(positions, default=0) or usable[slot]
        return usable

    def take(self, slot: int, position: int) -> int:
        """Take a snapshot of the slot's current state, and return its row."""
        row = self.rows_at[slot].get(position)
        if row is None:
            if not self._free:
                self._replace(next(iter(self._slots_of)))
            row = self._free.pop()
            self.copies.append((slot, row))
        self._refer(slot, position, row)
        return row

    def next_stop(self, slot: int, stored: int, end: int) -> int:
        """Return the next position after `stored` at which prefilling pauses for a snapshot of the slot, at most
        `end`."""
        return min([end, *(stop for stop in self.stops[slot] if stop > stored)])

    def reach(self, slots: np.ndarray, stored: np.ndarray, copyable: np.ndarray) -> None:
        """Take snapshots of slots that reach a planned pause, if other sessions may reuse all tokens before it."""
        for slot in slots.tolist():
            if (position := int(stored[slot])) in self.stops[slot]:
                self.stops[slot].remove(position)
                if copyable[slot] == position:
                    self.take(slot, position)

    def _refer(self, slot: int, position: int, row: int) -> None:
        self.rows_at[slot][position] = row
        self._slots_of[row] = self._slots_of.pop(row, set()) | {slot}  # now the most recently used one

    def _replace(self, row: int) -> None:
        for slot in self._slots_of.pop(row):
            rows_at = self.rows_at[slot].items()
            self.rows_at[slot] = {position: other for position, other in rows_at if other != row}
        self._free.append(row)

    def restore(self, slot: int, position: int, stored: int) -> None:
        """Reset the slot's state from position `stored` to the earlier `position`, for which `usable` must have found a
        state."""
        if position == 0:
            self.drop(slot)
            self.copies.append((EMPTY_STATE, slot))
            return
        if position != stored:
            row = self.rows_at[slot][position]
            self._refer(slot, position, row)
            self.copies.append((row, slot))
        for later in [later for later in self.rows_at[slot] if later > position]:
            self._forget(slot, later)

    def share(self, source: int, stored: int, target: int, position: int) -> None:
        """Give `target` the state of `source` at `position` and the snapshots up to there. The current state of
        `source` is at `stored`."""
        self.drop(target)
        if position == 0:
            self.copies.append((EMPTY_STATE, target))
            return
        if position == stored:
            self.take(source, position)
        for earlier, row in self.rows_at[source].items():
            if earlier <= position:
                self.rows_at[target][earlier] = row
                self._slots_of[row].add(target)
        row = self.rows_at[source][position]
        self._refer(target, position, row)
        self.copies.append((row, target))

    def exchange(self, first: int, second: int) -> None:
        """Exchange the states and the snapshots of two slots."""
        self.copies += [(first, self.unused), (second, first), (self.unused, second)]
        swapped = {first: second, second: first}
        for row in {*self.rows_at[first].values(), *self.rows_at[second].values()}:
            self._slots_of[row] = {swapped.get(slot, slot) for slot in self._slots_of[row]}
        self.rows_at[first], self.rows_at[second] = self.rows_at[second], self.rows_at[first]
        self.stops[first], self.stops[second] = self.stops[second], self.stops[first]

    def drop(self, slot: int) -> None:
        """Forget the slot's snapshots. Snapshots that other slots share stay."""
        self.stops[slot].clear()
        for position in list(self.rows_at[slot]):
            self._forget(slot, position)

    def _forget(self, slot: int, position: int) -> None:
        row = self.rows_at[slot].pop(position)
        self._slots_of[row].discard(slot)
        if not self._slots_of[row]:
            del self._slots_of[row]
            self._free.append(row)
