"""The arrays of one forward: its tokens as one flat row, the inputs of the model, and the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, NamedTuple

import numpy as np

from TrainingFactory.sampling.picking import Data
from TrainingFactory.sampling.planning import EMPTY, StepPlan
from TrainingFactory.sampling.twins import TwinRows


@dataclass(slots=True)
class FlatBatch:
    """Inputs of one forward: its N tokens as a flat row, and the M rows of logits from which tokens are drawn."""

    tokens: np.ndarray  # [N]
    positions: np.ndarray  # [N]
    slots: np.ndarray  # [N] slot of each token; `table.num_slots`: padding
    fed_counts: np.ndarray  # [R] tokens of each dense row
    rows: np.ndarray  # [M] slot
    offsets: np.ndarray  # [M] 0: after the row's last known token; k: after k guesses; negative: before it
    is_used: np.ndarray  # [M] whether the drawn token is used
    logit_tokens: np.ndarray  # [M] flat token of each row of logits


class StepInputs(NamedTuple, Generic[Data]):
    """Inputs of a forward without CUDA graph. U of the N tokens are computed: all of them, unless rows that feed equal
    tokens after equal histories (twins) are merged."""

    tokens: Data  # [U]
    positions: Data  # [U]
    cache_positions: Data  # [tables * N] positions of the pool to write
    logit_tokens: Data  # [L] computed tokens whose logits are needed; L = M without twins
    source_tokens: Data  # [N] the computed token for each token; empty without twins
    logit_rows: Data  # [M] the row of logits for each draw; empty without twins
    dense_pad: Data  # [P * T] `Part.pad` and `Part.unpad` of the dense part; empty without padding
    dense_unpad: Data  # [n]
    chunk_pad: Data  # [P * T] the same of the chunks
    chunk_unpad: Data  # [n]
    rope: Data  # [3 * U] rotary positions; empty if they are `positions`
    ends: Data  # [U] last visible position, for models that see whole images; else empty


class GraphInputs(NamedTuple, Generic[Data]):
    """Inputs of a forward that a CUDA graph may record, without the inputs of the draws. One launch may run two
    forwards; the second one then feeds the tokens that the first one samples."""

    tokens: Data  # [N] ids; -1 - slot: the token that this slot samples in the previous leg or launch
    positions: Data  # [N]
    cache_positions: Data  # [tables * N] positions of the pool to write
    logit_tokens: Data  # [M] tokens whose logits are drawn from; empty in the second leg: all
    target_slots: Data  # [M] slot whose latest token the draw becomes; `table.num_slots`: not used
    rope: Data  # [3 * N] rotary positions; empty if they are `positions`
    # [R] rows of the state cache of the dense rows; `table.num_slots`: padding; empty without states
    state_slots: Data
    stops: Data  # [M * K] stop tokens of each draw's slot; empty without states

    def without_effects(self, unused_slot: int) -> GraphInputs[np.ndarray]:
        """Return inputs for a dry run: the same forward, with its draws and states written to the unused row, so that
        it changes no slot. It does write keys and values to the cache, which the real forward then overwrites with the
        same ones."""
        target_slots, state_slots = (
            np.full(len(slots), unused_slot) for slots in (self.target_slots, self.state_slots)
        )
        return self._replace(target_slots=target_slots, state_slots=state_slots)  # pyright: ignore


class SampledTokens(NamedTuple):
    """Tokens sampled by one or two forwards, ordered by slot and position."""

    slots: np.ndarray
    positions: np.ndarray  # positions in their slot's sequence
    tokens: np.ndarray
    logprobs: np.ndarray


def select_leaders(plan: StepPlan, twin_rows: TwinRows) -> StepPlan:
    rows, chunks = twin_rows.leading_rows[: len(plan.dense)], twin_rows.leading_rows[len(plan.dense) :]
    return replace(plan, dense=plan.dense[rows], slots=plan.slots[chunks], counts=plan.counts[chunks])


def make_step_inputs(
    batch: FlatBatch, cache_positions: np.ndarray, twin_rows: TwinRows | None, fed: np.ndarray, counts: np.ndarray,
    rope: np.ndarray,
) -> StepInputs[np.ndarray]:  # fmt: skip
    """Return the inputs of a forward. `fed` and `counts` [rows] are the numbers of tokens of each dense row and of each
    chunk. `rope` [N, 3] are the rotary positions, empty if they equal the token positions."""
    if twin_rows is not None and len(rope):
        rope = rope[twin_rows.is_leader]
    inputs = *pad_indices(fed), *pad_indices(counts), rope.T.ravel(), EMPTY
    logit_tokens = batch.logit_tokens
    if twin_rows is None:
        return StepInputs(batch.tokens, batch.positions, cache_positions, logit_tokens, EMPTY, EMPTY, *inputs)
    keep, logit_rows = np.unique(twin_rows.source_tokens[logit_tokens], return_inverse=True)
    tokens, positions = batch.tokens[twin_rows.is_leader], batch.positions[twin_rows.is_leader]
    return StepInputs(tokens, positions, cache_positions, keep, twin_rows.source_tokens, logit_rows, *inputs)


def cover_slots(slots: np.ndarray, counts: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray]:
    """Return the slots and their numbers of tokens. If the range from the first to the last slot is at most 1.5 times
    as long as `slots`, return the whole range as a slice, because reading a slice of the cache needs no copy."""
    if not len(slots) or slots[-1] - slots[0] + 1 > 1.5 * len(slots):
        return slots, counts
    first_slot, end_slot = int(slots[0]), int(slots[-1]) + 1
    counts_by_slot = np.zeros(end_slot - first_slot, np.int64)
    counts_by_slot[slots - first_slot] = counts
    return slice(first_slot, end_slot), counts_by_slot


def pad_indices(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two index arrays for padding rows of `counts` tokens to [rows, longest]: the token at each padded
    position, flattened, and the padded position of each token. Both are empty if all rows have the same length."""
    if not len(counts) or (counts == counts[0]).all():
        return EMPTY, EMPTY
    columns = np.arange(counts.max())
    starts = counts.cumsum() - counts
    pad = starts[:, None] + np.minimum(columns, counts[:, None] - 1)
    return np.maximum(pad.ravel(), 0), np.flatnonzero(columns < counts[:, None])


def find_accepted(batch: FlatBatch, drawn_tokens: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return a mask [M] of the rows of logits to use: those for which every guess up to that row equals the token drawn
    in its place and is no stop token."""
    is_rejected = np.zeros(len(drawn_tokens), bool)
    guesses = np.flatnonzero(batch.offsets > 0)
    preceding_draws = drawn_tokens[guesses - 1]
    is_stop = (stops[batch.rows[guesses]] == preceding_draws[:, None]).any(1)
    is_rejected[guesses] = (batch.tokens[guesses] != preceding_draws) | is_stop
    first_rejected = np.full(len(stops), len(drawn_tokens))  # [S] offset of each slot's first rejected guess
    np.minimum.at(first_rejected, batch.rows[is_rejected], batch.offsets[is_rejected])
    return batch.offsets < first_rejected[batch.rows]
