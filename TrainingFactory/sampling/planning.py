"""Planning of the next forward: the rows to decode, with draft tokens (guesses), and the chunks to prefill."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from TrainingFactory.common.image_tokens import VIRTUAL, find_image_end
from TrainingFactory.sampling.drafts import CONTEXT_TOKENS, DraftTable
from TrainingFactory.sampling.gpu.graphs import SPANS, choose_row_tokens, round_up_rows
from TrainingFactory.sampling.table import CHUNK, SlotTable

EMPTY = np.zeros(0, np.int64)
PIECES = (64, 512, 2048)  # numbers of chunk tokens with a CUDA graph, if the GPU kernels run the forward
GUESSED_TOKENS = 512  # most dense tokens of a forward with guesses


@dataclass(slots=True)
class StepPlan:
    """Plan of one forward: the rows to decode and the chunks to prefill. Row i of the dense part, which decodes,
    belongs to slot i."""

    dense: np.ndarray  # [D] slots that feed their next token
    rows: int = 0  # R, dense rows including unused ones
    feeds_unused: bool = False  # feed unused rows too, so that shapes recur
    guesses: np.ndarray | None = None  # [D, most] further tokens: the rest of a reply, or draft tokens
    guess_counts: np.ndarray = field(default_factory=lambda: EMPTY)  # [D] how many of them to feed
    span: int = 0  # tokens that every row feeds, so that shapes recur; 0: as many as each row has
    # [P] slots that feed a chunk, in ascending order.
    slots: np.ndarray = field(default_factory=lambda: EMPTY)
    counts: np.ndarray = field(default_factory=lambda: EMPTY)  # [P] tokens of each chunk
    may_run_twice: bool = False  # the launch may feed a sampled token at once and sample a second one


class StepPlanner:
    """Planner of forwards. `few_shapes` limits the number of shapes, because each needs a CUDA graph."""

    def __init__(
        self, table: SlotTable, prefill_tokens: int, drafts: DraftTable | None, guesses: int, few_shapes: bool
    ) -> None:
        self.table, self.prefill_tokens, self.few_shapes = table, prefill_tokens, few_shapes
        self.drafts, self.guesses = drafts, guesses
        self.has_images = False  # prompts may have images
        self.keeps_images_whole = False  # a chunk ends before or after an image
        self.tiled = False  # chunks of different lengths share a forward without padding

    def plan(self, with_guesses: bool = True) -> StepPlan:
        """Plan a step: all decoding rows, and the oldest prefill chunks that fit into the token budget."""
        table = self.table
        # A row whose in-flight token reaches the limit has nothing more to feed.
        running_slots = np.flatnonzero(
            table.running & ((table.in_flight == 0) | (table.lengths < table.limit))
        )
        is_prefilling = table.stored[running_slots] < table.chunked[running_slots]
        dense_slots, prefill_queue = running_slots[~is_prefilling], running_slots[is_prefilling]
        if table.deterministic:
            return self._plan_deterministic_step(dense_slots, prefill_queue)
        num_rows = int(dense_slots[-1]) + 1 if len(dense_slots) else 0
        if self.few_shapes and num_rows:
            num_rows = round_up_rows(num_rows, table.num_slots)
        chunk_slots, counts, max_count, budget = [], [], 0, self.prefill_tokens
        if self.tiled and num_rows:
            waiting_tokens = (table.chunked[prefill_queue] - table.stored[prefill_queue]).sum()
            budget = min(budget, next((size for size in PIECES[1:] if waiting_tokens <= 2 * size), budget))
        for slot in prefill_queue[table.used[prefill_queue].argsort(kind="stable")].tolist():
            count = min(table.find_chunk_end(slot) - int(table.stored[slot]), budget)
            if self.keeps_images_whole:
                stored = int(table.stored[slot])
                known_ids = table.ids[slot, : table.chunked[slot]]
                count = find_image_end(known_ids, stored, stored + count) - stored
            num_tokens = sum(counts) + count if self.tiled else (len(chunk_slots) + 1) * max(max_count, count)
            if chunk_slots and num_tokens > budget:
                continue
            max_count = max(max_count, count)
            chunk_slots.append(slot)
            counts.append(count)
        order = np.argsort(chunk_slots)
        slots, chunk_counts = np.array(chunk_slots, np.int64)[order], np.array(counts, np.int64)[order]
        if self.has_images and self._shows_images(slots, chunk_counts, dense_slots):
            # The host must know the other tokens of a step with images: one may be the model's placeholder.
            dense_slots = dense_slots[table.in_flight[dense_slots] == 0]
            num_rows = num_rows if len(dense_slots) else 0
        plan = StepPlan(dense_slots, num_rows, self.few_shapes, slots=slots, counts=chunk_counts)
        if len(dense_slots) and with_guesses:
            self._add_further_tokens(plan)
        return plan

    def _shows_images(self, slots: np.ndarray, token_counts: np.ndarray, dense_slots: np.ndarray) -> bool:
        table = self.table
        return bool((table.ids[dense_slots, table.stored[dense_slots]] >= VIRTUAL).any()) or any(
            (table.ids[slot, table.stored[slot] : table.stored[slot] + count] >= VIRTUAL).any()
            for slot, count in zip(slots, token_counts, strict=True)
        )

    def _add_further_tokens(self, plan: StepPlan) -> None:
        """Let rows feed several tokens: draft tokens and, with CUDA graphs, known tokens missing in the cache."""
        table, num_dense = self.table, len(plan.dense)
        num_rows = plan.rows if plan.feeds_unused else num_dense
        max_guesses = min(max(SPANS) - 1 if self.few_shapes else self.guesses, GUESSED_TOKENS // num_rows - 1)
        if max_guesses < 1:
            return
        known_lengths = table.lengths[plan.dense]
        guesses, guess_counts = np.zeros((num_dense, max_guesses), np.int64), np.zeros(num_dense, np.int64)
        if self.drafts is not None:
            guesses, guess_counts = self.drafts.guess(
                table.get_recent_tokens(plan.dense, known_lengths, CONTEXT_TOKENS), max_guesses
            )
            guess_counts = np.minimum(guess_counts, table.limit[plan.dense] - known_lengths - 1)
        if self.few_shapes:
            self._use_known_tokens(plan.dense, known_lengths, guesses, guess_counts)
            plan.span = choose_row_tokens(guess_counts, plan.rows, 1 + max_guesses)
            guess_counts = np.minimum(guess_counts, max(plan.span - 1, 0))
        if guess_counts.any():
            plan.guesses, plan.guess_counts = guesses, guess_counts

    def _use_known_tokens(
        self, dense: np.ndarray, known_lengths: np.ndarray, guesses: np.ndarray, guess_counts: np.ndarray
    ) -> None:
        """Replace the guesses of a row by its known tokens that the cache lacks."""
        stored_lengths = self.table.stored[dense]
        for row in np.flatnonzero(stored_lengths + 1 < known_lengths):
            unsent_ids = self.table.ids[dense[row], stored_lengths[row] + 1 : known_lengths[row]]
            unsent_ids = unsent_ids[: guesses.shape[1]]
            guesses[row, : len(unsent_ids)] = unsent_ids
            guess_counts[row] = len(unsent_ids)

    def _plan_deterministic_step(self, dense: np.ndarray, prefill_queue: np.ndarray) -> StepPlan:
        """Plan a step of deterministic mode: a single chunk, or one decoding row per slot."""
        table = self.table
        if not len(prefill_queue):
            return StepPlan(dense, table.num_slots, feeds_unused=True)
        slots = prefill_queue[:1]
        counts = np.minimum(CHUNK - table.stored[slots] % CHUNK, table.chunked[slots] - table.stored[slots])
        return StepPlan(dense[:0], slots=slots, counts=counts)
