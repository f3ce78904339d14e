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
    """The N tokens of a forward as one flat row, and the M rows of logits to draw from."""

    tokens: np.ndarray  # [N]
    positions: np.ndarray  # [N]
    slots: np.ndarray  # [N] slot of each token; `table.slots`: padding
    fed: np.ndarray  # [R] tokens of each dense row
    rows: np.ndarray  # [M] slot
    offsets: np.ndarray  # [M] 0: after the row's last known token; k: after k guesses; negative: before it
    live: np.ndarray  # [M] whether the drawn token is used
    keep: np.ndarray  # [M] flat token of each row of logits


class StepInputs(NamedTuple, Generic[Data]):
    """Inputs of a forward without CUDA graph. U of the N tokens are computed: all of them, unless rows that feed equal
    tokens after equal histories (twins) are merged."""

    tokens: Data  # [U]
    positions: Data  # [U]
    cache_positions: Data  # [tables * N] positions of the pool to write
    keep: Data  # [L] computed tokens whose logits are needed; L = M without twins
    source: Data  # [N] the computed token for each token; empty without twins
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
    keep: Data  # [M] tokens whose logits are drawn from; empty in the second leg: all
    target_slots: Data  # [M] slot whose latest token the draw becomes; `table.slots`: the draw is not used
    rope: Data  # [3 * N] rotary positions; empty if they are `positions`
    state_slots: (
        Data  # [R] rows of the state cache of the dense rows; `table.slots`: padding; empty without states
    )
    stops: Data  # [M * K] stop tokens of each draw's slot; empty without states

    def dry(self, unused: int) -> GraphInputs[np.ndarray]:
        """Return inputs for a dry run: the same forward, with its draws and states written to the unused row, so that
        it changes no slot. It does write keys and values to the cache, which the real forward then overwrites with the
        same ones."""
        target_slots, state_slots = (
            np.full(len(slots), unused) for slots in (self.target_slots, self.state_slots)
        )
        return self._replace(target_slots=target_slots, state_slots=state_slots)  # pyright: ignore


class SampledTokens(NamedTuple):
    """New tokens, ordered by slot and position."""

    slots: np.ndarray
    places: np.ndarray  # positions in their slot's sequence
    tokens: np.ndarray
    logprobs: np.ndarray


def leaders_only(plan: StepPlan, twin_rows: TwinRows) -> StepPlan:
    dense, chunks = twin_rows.leaders[: len(plan.dense)], twin_rows.leaders[len(plan.dense) :]
    return replace(plan, dense=plan.dense[dense], slots=plan.slots[chunks], counts=plan.counts[chunks])


def step_inputs(
    batch: FlatBatch, cache_positions: np.ndarray, twin_rows: TwinRows | None, fed: np.ndarray, counts: np.ndarray,
    rope: np.ndarray,
) -> StepInputs[np.ndarray]:  # fmt: skip
    """Return the inputs of a forward. `fed` and `counts` [rows] are the numbers of tokens of each dense row and of each
    chunk. `rope` [N, 3] are the rotary positions, empty if they equal the token positions."""
    if twin_rows is not None and len(rope):
        rope = rope[twin_rows.is_leader]
    rest = *padding(fed), *padding(counts), rope.T.ravel(), EMPTY
    if twin_rows is None:
        return StepInputs(batch.tokens, batch.positions, cache_positions, batch.keep, EMPTY, EMPTY, *rest)
    keep, logit_rows = np.unique(twin_rows.source[batch.keep], return_inverse=True)
    tokens, positions = batch.tokens[twin_rows.is_leader], batch.positions[twin_rows.is_leader]
    return StepInputs(tokens, positions, cache_positions, keep, twin_rows.source, logit_rows, *rest)


def covered(slots: np.ndarray, counts: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray]:
    """Return the slots and their numbers of tokens. If the range from the first to the last slot is at most 1.5 times
    as long as `slots`, return the whole range as a slice, because reading a slice of the cache needs no copy."""
    if not len(slots) or slots[-1] - slots[0] + 1 > 1.5 * len(slots):
        return slots, counts
    first, end = int(slots[0]), int(slots[-1]) + 1
    counts_by_slot = np.zeros(end - first, np.int64)
    counts_by_slot[slots - first] = counts
    return slice(first, end), counts_by_slot


def padding(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two index arrays for padding rows of `counts` tokens to [rows, longest]: the token at each padded
    position, flattened, and the padded position of each token. Both are empty if all rows have the same length."""
    if not len(counts) or (counts == counts[0]).all():
        return EMPTY, EMPTY
    columns = np.arange(counts.max())
    starts = counts.cumsum() - counts
    pad = starts[:, None] + np.minimum(columns, counts[:, None] - 1)
    return np.maximum(pad.ravel(), 0), np.flatnonzero(columns < counts[:, None])


def accepted(batch: FlatBatch, drawn_tokens: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return a mask [M] of the rows of logits to use: those for which every guess up to that row equals the token drawn
    in its place and is no stop token."""
    is_rejected = np.zeros(len(drawn_tokens), bool)
    guesses = np.flatnonzero(batch.offsets > 0)
    expected = drawn_tokens[guesses - 1]
    is_stop = (stops[batch.rows[guesses]] == expected[:, None]).any(1)
    is_rejected[guesses] = (batch.tokens[guesses] != expected) | is_stop
    first = np.full(len(stops), len(drawn_tokens))  # [S] offset of each slot's first rejected guess
    np.minimum.at(first, batch.rows[is_rejected], batch.offsets[is_rejected])
    return batch.offsets < first[batch.rows]
