"""Size of the KV cache: the pages that fit into the memory, and the limits of slots and lengths that follow."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from TrainingFactory.sampling.cache.pages import PAGE, CachePages
from TrainingFactory.sampling.cache.snapshots import Snapshots
from TrainingFactory.sampling.cache.states import StateShape
from TrainingFactory.sampling.cache.store import LayerShape, list_windows
from TrainingFactory.sampling.table import SlotTable

log = logging.getLogger(__name__)
GPU_ROOM = 4  # on a GPU, slots have fixed pages if the memory holds this many times all slots at full length
LAZY_ROOM = 4  # on a CPU, slots have fixed pages if this many times the memory holds all slots at full length
SNAPSHOTS_PER_SLOT = 2  # for each slot: the ends of its prompt and of its last turn
PREFILL_TOKENS = 8192  # most tokens of prompts in one forward


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def size_states(table: SlotTable, shapes: Sequence[StateShape], memory_bytes: int) -> int:
    """Set the number of snapshots of recurrent layers, and return the memory that is left for the KV cache. States get
    at most half of the memory. If that is too little, reduce the number of snapshots first, then the number of
    slots."""
    if not shapes:
        return memory_bytes
    row_bytes = sum(shape.row_bytes for shape in shapes)
    num_rows = memory_bytes // 2 // row_bytes
    if num_rows < 3:
        raise ValueError(
            f"the states of one sequence need {row_bytes / 2**20:.1f} MiB, and a snapshot as much, but "
            f"{memory_bytes / 2**20:.1f} MiB are available for states and KV cache. Use a smaller model or raise "
            "sampling.cache_gib."
        )
    num_slots = table.num_slots
    num_rows -= 1  # for padding
    if num_rows < num_slots + num_slots // 2:
        num_slots = min(num_slots, max(1, num_rows * 2 // 3))
        if num_slots < table.num_slots:
            log.warning(
                "Sampling with %d slots instead of %d, because the states of a recurrent model need %.1f MiB a slot",
                num_slots, table.num_slots, row_bytes / 2**20,
            )  # fmt: skip
            table.resize(num_slots, table.max_length)
    table.state_snapshots = min(SNAPSHOTS_PER_SLOT * num_slots, num_rows - num_slots)
    return memory_bytes - (num_slots + 1 + table.state_snapshots) * row_bytes


def size_cache(table: SlotTable, shapes: Sequence[LayerShape], memory_bytes: int, *, lazy: bool) -> None:
    """Set the table's number of pages to the most that fit into the memory. Without room for fixed pages, slots share
    the pages of common prefixes; deterministic mode, in which no session may be preempted, has fewer slots. `lazy`: the
    memory is committed only when it is written, and few episodes reach the full length."""
    length = round_up(table.max_length, 64)
    windows, pages_per_slot = list_windows(shapes), length // PAGE
    slot_bytes = length * sum(shape.token_bytes for shape in shapes)
    fitting_slots = memory_bytes * (LAZY_ROOM if lazy else 1) // slot_bytes
    if table.deterministic and fitting_slots < table.num_slots:
        if not fitting_slots:
            raise ValueError(
                f"the KV cache of one sequence of {table.max_length} tokens needs {slot_bytes / 2**30:.1f} GiB, "
                f"but {memory_bytes / 2**30:.1f} GiB are available. Lower model.max_length."
            )
        log.warning(
            "Deterministic sampling with %d slots instead of %d, because the KV cache has %.1f GiB of memory",
            fitting_slots, table.num_slots, memory_bytes / 2**30,
        )  # fmt: skip
        table.resize(fitting_slots, table.max_length)
    needed_slots = table.num_slots if shapes[0].device.type == "cpu" else table.num_slots * GPU_ROOM
    has_fixed_pages = table.deterministic or fitting_slots >= needed_slots
    page_counts = [table.num_slots * pages_per_slot] * len(windows)
    if not has_fixed_pages:
        page_counts = plan_pages(shapes, table.num_slots, length, memory_bytes)
    if min(page_counts) < pages_per_slot:
        max_length = min(page_counts) * PAGE // 64 * 64
        if max_length < 64:
            raise ValueError(
                f"{memory_bytes / 2**30:.2f} GiB are available for the KV cache, which is less than 64 tokens need. "
                "Use a smaller model or raise sampling.cache_gib."
            )
        log.warning(
            "Sequences are truncated at %d tokens instead of %d, because the KV cache has %.1f GiB of memory",
            max_length, table.max_length, memory_bytes / 2**30,
        )  # fmt: skip
        table.resize(table.num_slots, max_length)
        length = max_length
    table.pages = CachePages(table.num_slots, length, windows, page_counts, fixed=has_fixed_pages)
    if table.state_snapshots:
        table.snapshots = Snapshots(table.num_slots, table.state_snapshots)


def plan_pages(shapes: Sequence[LayerShape], num_slots: int, max_length: int, memory: int) -> list[int]:
    """Return the number of pages of each table. No table needs more than all slots can hold; one of a window needs no
    more than the windows of all slots and the prompts that are being prefilled."""
    slot_pages = -(-max_length // PAGE)
    windows = list_windows(shapes)
    page_bytes = [
        PAGE * sum(shape.token_bytes for shape in shapes if shape.window == window) for window in windows
    ]
    needed_pages = [num_slots * slot_pages] * len(windows)
    for index, window in enumerate(windows):
        if window is not None and len(windows) > 1:
            window_pages = window // PAGE + 4
            needed_pages[index] = min(
                needed_pages[index], num_slots * window_pages + 4 * max(slot_pages, PREFILL_TOKENS // PAGE)
            )
    total = sum(num_pages * num_bytes for num_pages, num_bytes in zip(needed_pages, page_bytes, strict=True))
    if total > memory:  # tables of windows, which are small, get what they need, at most half of the memory
        window_bytes = sum(needed_pages[i] * page_bytes[i] for i in range(1, len(windows)))
        window_share = min(1.0, memory / 2 / window_bytes) if window_bytes else 1.0
        page_counts = [int(num_pages * window_share) for num_pages in needed_pages]
        remaining_bytes = memory - sum(page_counts[i] * page_bytes[i] for i in range(1, len(windows)))
        page_counts[0] = min(needed_pages[0], remaining_bytes // page_bytes[0])
        needed_pages = [max(1, num_pages) for num_pages in page_counts]
    return needed_pages
