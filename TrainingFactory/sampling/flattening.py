"""Conversion of a plan and the slot table to the flat arrays of a forward, and of the drawn tokens to updates of the
table."""

from __future__ import annotations

import numpy as np
import torch

from TrainingFactory.sampling.batches import FlatBatch, SampledTokens, find_accepted
from TrainingFactory.sampling.picking import DrawInputs, require_finite, uniforms, unpack_draws
from TrainingFactory.sampling.planning import StepPlan
from TrainingFactory.sampling.table import CHUNK, SlotTable
from TrainingFactory.sampling.tiles import TileLayout, pad_to


def flatten_plan(table: SlotTable, plan: StepPlan, start: int, layout: TileLayout | None = None) -> FlatBatch:
    """Return the tokens that a plan feeds, dense rows first, and the rows of logits to draw from. Padding feeds token
    0, at position `start` (after the shared prefix), to the scratch page."""
    fed_counts = np.full(plan.rows, int(plan.feeds_unused))
    fed_counts[plan.dense] = 1
    if plan.guesses is not None:
        fed_counts[plan.dense] += plan.guess_counts
        fed_counts = np.full(plan.rows, plan.span) if plan.span else fed_counts
    chunk_start = int(fed_counts.sum())
    num_tokens = chunk_start + (CHUNK if table.deterministic and len(plan.slots) else int(plan.counts.sum()))
    num_tokens = num_tokens if layout is None else chunk_start + layout.chunk_tokens
    tokens, positions = np.zeros(num_tokens, np.int64), np.full(num_tokens, start)
    token_slots = np.full(num_tokens, table.num_slots)
    row_starts = fed_counts.cumsum() - fed_counts  # [R] flat index of each row's first token
    stored_lengths, dense_starts = table.stored[plan.dense], row_starts[plan.dense]
    tokens[dense_starts] = table.ids[plan.dense, stored_lengths]
    positions[dense_starts] = stored_lengths
    token_slots[dense_starts] = plan.dense
    if plan.guesses is not None:
        row_indices, columns = np.nonzero(np.arange(plan.guesses.shape[1]) < plan.guess_counts[:, None])
        guess_indices = dense_starts[row_indices] + 1 + columns
        tokens[guess_indices] = plan.guesses[row_indices, columns]
        positions[guess_indices] = stored_lengths[row_indices] + 1 + columns
        token_slots[guess_indices] = plan.dense[row_indices]
    if len(plan.slots):
        chunk_start = int(table.stored[plan.slots[0]]) % CHUNK if table.deterministic else chunk_start
        slots, starts = np.repeat(plan.slots, plan.counts), plan.counts.cumsum() - plan.counts
        stored_lengths = table.stored[slots] + np.arange(len(slots)) - np.repeat(starts, plan.counts)
        chunk_range = slice(chunk_start, chunk_start + len(slots))
        tokens[chunk_range] = table.ids[slots, stored_lengths]
        positions[chunk_range], token_slots[chunk_range] = stored_lengths, slots
    logit_rows = _find_logit_rows(table, plan, fed_counts, row_starts)
    if layout is not None:  # pad the rows of logits to the graph's shape; without a graph, draw at least once
        num_rows = max(1, len(logit_rows[0]))
        if layout.is_recorded:
            num_rows = int(fed_counts.sum()) + layout.num_chunk_tiles
        logit_rows = [pad_to(array, num_rows) for array in logit_rows]
    return FlatBatch(tokens, positions, token_slots, fed_counts, *logit_rows)


def _find_logit_rows(
    table: SlotTable, plan: StepPlan, fed_counts: np.ndarray, row_starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return `rows` and the three fields after it of a `FlatBatch`: dense tokens and last prompt tokens."""
    known_after = np.zeros(plan.rows, np.int64)  # [R] known tokens after the row's first fed token
    known_after[plan.dense] = table.lengths[plan.dense] - table.stored[plan.dense] - 1
    if plan.feeds_unused and plan.guesses is None and not len(plan.slots):  # one token per row
        is_used = np.zeros(plan.rows, bool)
        is_used[plan.dense] = known_after[plan.dense] == 0
        return row_starts, -known_after, is_used, row_starts
    last_offsets = np.full(plan.rows, -1)  # [R] largest offset whose drawn token is used
    last_offsets[plan.dense] = (0 if plan.guesses is None else plan.guess_counts) - known_after[plan.dense]
    rows = np.repeat(np.arange(plan.rows), fed_counts)
    logit_tokens = np.arange(len(rows))
    offsets = logit_tokens - np.repeat(row_starts + known_after, fed_counts)
    is_used = (offsets >= 0) & (offsets <= last_offsets[rows])
    if not len(plan.slots):
        return rows, offsets, is_used, logit_tokens
    finished_rows = np.flatnonzero(table.stored[plan.slots] + plan.counts == table.lengths[plan.slots])
    return (
        np.concatenate((rows, plan.slots[finished_rows])),
        np.concatenate((offsets, np.zeros(len(finished_rows), np.int64))),
        np.concatenate((is_used, np.ones(len(finished_rows), bool))),
        np.concatenate((logit_tokens, len(rows) + plan.counts.cumsum()[finished_rows] - 1)),
    )


def make_draw_inputs(table: SlotTable, batch: FlatBatch) -> DrawInputs[np.ndarray]:
    """Return the random numbers and temperatures of the batch's draws, and the filters (top-p, top-k, min-p) if a row
    that draws a used token has any."""
    draw_slots, used_slots = batch.rows, batch.rows[batch.is_used]
    uniform_numbers = uniforms(table.seed[draw_slots], table.lengths[draw_slots] + batch.offsets)
    if (table.top_p[used_slots] < 1).any() or table.top_k[used_slots].any() or table.min_p[used_slots].any():
        filters = table.top_p[draw_slots], table.top_k[draw_slots], table.min_p[draw_slots]
        return DrawInputs(uniform_numbers, table.temperature[draw_slots], *filters)
    is_scaled = not (table.temperature[used_slots] == 1).all()
    return DrawInputs(uniform_numbers, table.temperature[draw_slots] if is_scaled else None)


def select_rope(table: SlotTable, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the rotary positions [N, 3] of the tokens at these positions of their slots. Those of padding tokens are
    arbitrary."""
    return table.rope[np.minimum(slots, table.num_slots - 1), :, np.minimum(positions, table.max_length - 1)]


def apply_draws(
    table: SlotTable, plan: StepPlan, batch: FlatBatch, samples: torch.Tensor | None
) -> SampledTokens:
    """Return the drawn tokens up to the first wrong guess, and advance the table's `stored`."""
    is_used = batch.is_used
    tokens, logprobs = unpack_draws(samples, is_used)
    num_new_tokens: np.ndarray | int = 1
    if plan.guesses is not None:
        is_used = is_used & find_accepted(batch, tokens, table.stops)
        num_dense = int(batch.fed_counts.sum())
        num_drawn = np.bincount(batch.rows[:num_dense][is_used[:num_dense]], minlength=plan.rows)[plan.dense]
        has_reply = table.lengths[plan.dense] - table.stored[plan.dense] > 1
        num_new_tokens = np.where(has_reply, plan.guess_counts + 1, num_drawn)
    table.advance_stored(plan.dense, num_new_tokens)
    if len(plan.slots):
        table.advance_stored(plan.slots, plan.counts)
    rows = batch.rows[is_used]
    return SampledTokens(
        rows,
        table.lengths[rows] + batch.offsets[is_used],
        tokens[is_used],
        require_finite(logprobs[is_used]),
    )
