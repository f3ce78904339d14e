"""Page tables of the KV cache: the pages of the pool that hold the tokens of each slot. Numpy only.

A page holds PAGE tokens. Slots with a common prefix share its full pages, which are never written again. The last,
partly filled page of a sequence belongs to one slot; sharing copies it. Layers with a sliding window have their own
table, which releases the pages that have left the window.

With enough memory, every slot has its own consecutive pages ("fixed"): attention then reads a slot without looking up
its pages, which is faster for short sequences, and sharing copies the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PAGE = 32  # tokens of a page
WINDOW_SLACK = 64  # tokens kept before the window, because a step can be rolled back by a few tokens


class PageCopies(NamedTuple):
    """Pending page copies of one page table. All sources are read before any target is written."""

    sources: list[int]
    targets: list[int]


class PageTable:
    """Page table of one pool: the pages of every slot. The pool's last page is scratch, for padding only."""

    def __init__(self, num_slots: int, per_slot: int, size: int, window: int | None, is_fixed: bool) -> None:
        self.window, self.fixed, self.num_pages = window, is_fixed, size
        self.scratch = size
        self.entries = np.full((num_slots + 1, per_slot), self.scratch, np.int64)  # the last row: padding
        self.begins = np.zeros(num_slots, np.int64)  # first page that a slot holds
        self.ends = np.zeros(num_slots, np.int64)  # first page that it does not hold
        self.references = np.zeros(size + 1, np.int64)
        self.num_free = size
        self._free_pages = np.arange(size)[::-1].copy()  # a stack: the first `num_free` pages are free
        self.copies: dict[int, int] = {}  # copies to make, source by target
        self.changed_slots: set[int] = set()  # slots whose entries differ from the device's copy
        if is_fixed:
            self.entries[:num_slots] = np.arange(num_slots * per_slot).reshape(num_slots, per_slot)
            self.ends[:] = per_slot
            self.changed_slots.update(range(num_slots))

    def reserve(self, slot: int, end_page: int) -> None:
        """Allocate the slot's pages before `end_page`. The caller has checked that enough pages are free."""
        start_page = int(self.ends[slot])
        if self.fixed or end_page <= start_page:
            return
        pages = self._take_pages(end_page - start_page)
        self.entries[slot, start_page:end_page] = pages
        self.references[pages] = 1
        self.ends[slot] = end_page
        self.changed_slots.add(slot)

    def _take_pages(self, num_pages: int) -> np.ndarray:
        self.num_free -= num_pages
        assert self.num_free >= 0, "reserve pages only if enough are free"
        return self._free_pages[self.num_free : self.num_free + num_pages]

    def free_pages(self) -> list[int]:
        return self._free_pages[: self.num_free].tolist()

    def reserve_many(self, slots: np.ndarray, end_pages: np.ndarray) -> None:
        """Allocate pages before `end_pages` for each slot, without a Python loop over the slots."""
        while len(slots := slots[lacks_pages := self.ends[slots] < end_pages]):
            end_pages = end_pages[lacks_pages]
            pages = self._take_pages(len(slots))
            self.entries[slots, self.ends[slots]] = pages
            self.references[pages] = 1
            self.ends[slots] += 1
            self.changed_slots.update(slots.tolist())

    def release(self, slot: int, first_page: int, end_page: int) -> None:
        """Release the slot's pages from `first_page` to before `end_page`."""
        pages = self.entries[slot, first_page:end_page]
        self.references[pages] -= 1
        unused_pages = pages[self.references[pages] == 0]
        self._free_pages[self.num_free : self.num_free + len(unused_pages)] = unused_pages
        self.num_free += len(unused_pages)
        self.entries[slot, first_page:end_page] = self.scratch
        self.changed_slots.add(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Keep the slot's first `length` tokens and release its other pages. If another slot shares the page of the
        next token, replace it by a copy, so that the slot can write there."""
        if self.fixed or not self.ends[slot]:
            return
        num_pages = -(-length // PAGE)
        if num_pages < self.ends[slot]:
            self.release(slot, max(num_pages, int(self.begins[slot])), int(self.ends[slot]))
            self.ends[slot] = num_pages
            self.begins[slot] = min(self.begins[slot], num_pages)
        last_page = num_pages - 1
        if length % PAGE and self.references[self.entries[slot, last_page]] > 1:
            shared_page = int(self.entries[slot, last_page])
            self.references[shared_page] -= 1
            self.ends[slot] = last_page
            self.reserve(slot, num_pages)
            self._copy(shared_page, int(self.entries[slot, last_page]))

    def share(self, source: int, target: int, length: int, end_page: int) -> None:
        """Give the slot `target`, which holds no pages, the first `length` tokens of `source`, and reserve its pages
        before `end_page`."""
        num_full_pages, tail_tokens = divmod(length, PAGE)
        if self.fixed:
            pages = slice(0, num_full_pages + bool(tail_tokens))
            sources, targets = self.entries[source, pages].tolist(), self.entries[target, pages].tolist()
            self.copies.update(zip(targets, map(self.copies.get, sources, sources), strict=True))
            return
        first_page = min(int(self.begins[source]), num_full_pages)
        shared_pages = self.entries[source, first_page:num_full_pages]
        self.references[shared_pages] += 1
        self.entries[target, first_page:num_full_pages] = shared_pages
        self.begins[target], self.ends[target] = first_page, num_full_pages
        self.changed_slots.add(target)
        self.reserve(target, max(end_page, num_full_pages + bool(tail_tokens)))
        if tail_tokens:
            self._copy(int(self.entries[source, num_full_pages]), int(self.entries[target, num_full_pages]))

    def _copy(self, source_page: int, target_page: int) -> None:
        # A source that is itself a target of this round has the contents of its own source.
        self.copies[target_page] = self.copies.get(source_page, source_page)

    def release_outside_window(self, slots: np.ndarray, stored_lengths: np.ndarray) -> None:
        """Release pages whose tokens have left the sliding window."""
        if self.window is None:
            return
        first_pages = np.maximum(stored_lengths - self.window - WINDOW_SLACK, 0) // PAGE
        for index in np.flatnonzero(first_pages > self.begins[slots]).tolist():
            slot, first_page = int(slots[index]), int(first_pages[index])
            self.release(slot, int(self.begins[slot]), first_page)
            self.begins[slot] = first_page

    def has_prefix(self, lengths: np.ndarray) -> np.ndarray:
        """Return which slots still hold all pages that the token after their first `lengths` [slots] tokens reads."""
        if self.window is None:
            return np.ones(len(lengths), bool)
        return self.begins <= np.maximum(lengths - self.window + 1, 0) // PAGE

    def exchange(self, low_slots: np.ndarray, high_slots: np.ndarray, num_pages: int) -> None:
        """Exchange the pages of each slot in `low_slots` with those of the slot at the same index in `high_slots`. The
        slots use at most their first `num_pages` pages."""
        all_slots = np.concatenate((low_slots, high_slots))
        swapped_slots = np.concatenate((high_slots, low_slots))
        if self.fixed:
            sources, targets = self.entries[swapped_slots, :num_pages], self.entries[all_slots, :num_pages]
            self.copies = dict(zip(targets.ravel().tolist(), sources.ravel().tolist(), strict=True))
            return
        for array in (self.entries, self.begins, self.ends):
            array[all_slots] = array[swapped_slots]
        self.changed_slots.update(all_slots.tolist())


class CachePages:
    """The page tables of all layers: one for each window size, and one for the layers without a window."""

    def __init__(
        self, slots: int, max_length: int, windows: Sequence[int | None], pages: Sequence[int], *, fixed: bool
    ) -> None:
        self.num_slots, self.fixed = slots, fixed
        self.pages_per_slot = -(-max_length // PAGE)
        self._windows_and_counts = list(zip(windows, pages, strict=True))
        self._has_windows = not fixed and any(window is not None for window in windows)
        self.peak_pages = 0  # most pages of the first table in use
        self.clear()

    def clear(self) -> None:
        """Release all pages of all slots."""
        self.tables = [
            PageTable(self.num_slots, self.pages_per_slot, count, window, self.fixed)
            for window, count in self._windows_and_counts
        ]

    @property
    def used_pages(self) -> int:
        """Return the number of pages in use in the first table."""
        return self.tables[0].num_pages - self.tables[0].num_free

    @property
    def num_free(self) -> int:
        return min([table.num_free for table in self.tables])

    def count_held_pages(self) -> np.ndarray:
        """Return the largest number of pages [slots] that each slot holds in any table."""
        return np.max([table.ends - table.begins for table in self.tables], 0)

    def count_reserved_tokens(self) -> np.ndarray:
        """Return the number of tokens [slots] for which each slot has pages."""
        return self.tables[0].ends * PAGE

    def reserve_many(self, slots: np.ndarray, lengths: np.ndarray) -> bool:
        """Reserve pages for these lengths, if enough pages are free for all slots."""
        end_pages = np.minimum(-(-lengths // PAGE), self.pages_per_slot)
        if int(np.maximum(end_pages - self.tables[0].ends[slots], 0).sum()) > self.num_free:
            return False
        for table in self.tables:
            table.reserve_many(slots, end_pages)
        self.peak_pages = max(self.peak_pages, self.used_pages)
        return True

    def count_missing(self, slot: int, length: int) -> int:
        """Return the number of pages that the slot lacks to hold `length` tokens."""
        return 0 if self.fixed else max(0, self.count_pages(length) - int(self.tables[0].ends[slot]))

    def count_copied_pages(self, slot: int, length: int) -> int:
        """Return the number of pages that `truncate` must copy: 1 if the slot would otherwise write to a page that it
        shares, else 0."""
        if self.fixed or not length % PAGE:
            return 0
        return int(any(table.references[table.entries[slot, length // PAGE]] > 1 for table in self.tables))

    def count_pages(self, length: int) -> int:
        return min(-(-length // PAGE), self.pages_per_slot)

    def locate(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the position in the pool [tables, N] of the tokens at these positions [N] of these slots [N]."""
        page_index, page_offset = positions // PAGE, positions % PAGE
        pool_positions = [table.entries[slots, page_index] * PAGE + page_offset for table in self.tables]
        return pool_positions[0][None] if len(pool_positions) == 1 else np.stack(pool_positions)

    def reserve(self, slot: int, length: int) -> None:
        for table in self.tables:
            table.reserve(slot, self.count_pages(length))
        self.peak_pages = max(self.peak_pages, self.used_pages)

    def release(self, slot: int) -> None:
        for table in self.tables:
            table.truncate(slot, 0)

    def truncate(self, slot: int, length: int) -> None:
        for table in self.tables:
            table.truncate(slot, length)

    def share(self, source: int, target: int, length: int, reserved_tokens: int) -> None:
        """Give the slot `target` the first `length` tokens of `source`, and reserve pages for `reserved_tokens`."""
        for table in self.tables:
            table.share(source, target, length, self.count_pages(reserved_tokens))

    def release_outside_window(self, slots: np.ndarray, stored_lengths: np.ndarray) -> None:
        if self._has_windows:
            for table in self.tables:
                table.release_outside_window(slots, stored_lengths)

    def get_usable(self, lengths: np.ndarray) -> np.ndarray:
        """Return `lengths` [slots], with 0 for slots that have released pages which the next token reads."""
        if not self._has_windows:
            return lengths
        return np.where(np.all([table.has_prefix(lengths) for table in self.tables], 0), lengths, 0)

    def exchange(self, low_slots: np.ndarray, high_slots: np.ndarray, length: int) -> None:
        """Exchange the pages of each slot in `low_slots` with those of the slot at the same index in `high_slots`. The
        longest of these slots has `length` tokens."""
        for table in self.tables:
            table.exchange(low_slots, high_slots, self.count_pages(length))

    def take_copies(self) -> list[PageCopies]:
        """Return and clear the pending page copies of each table."""
        copies = [PageCopies(list(table.copies.values()), list(table.copies)) for table in self.tables]
        for table in self.tables:
            table.copies = {}
        return copies
