"""Execution of one forward: from the table's arrays to tensors, through the model, to tokens and log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.sampling.cache.slots import ATTENTION, AttentionPart, LayerShape, SlotCache, StepContext
from TrainingFactory.sampling.cache.view import check_model, shared_view, unsupported_model
from TrainingFactory.sampling.gpu.graphs import DecodeGraphs, to_device
from TrainingFactory.sampling.picking import Data, DrawInputs, pick, require_finite, split_picked, uniforms
from TrainingFactory.sampling.planning import CHUNK, EMPTY, StepPlan
from TrainingFactory.sampling.table import SlotTable
from TrainingFactory.sampling.tiles import TileLayout, pad_to
from TrainingFactory.sampling.twins import TwinRows, find_twins


@dataclass(slots=True)
class FlatBatch:
    """The N tokens of a forward as one flat row, and the M rows of logits to draw from."""

    tokens: np.ndarray  # [N]
    positions: np.ndarray  # [N]
    where: np.ndarray  # [N] flat cache positions to write
    fed: np.ndarray  # [R] tokens of each dense row
    rows: np.ndarray  # [M] slot
    offsets: np.ndarray  # [M] 0: after the row's last known token; k: after k guesses; negative: before it
    live: np.ndarray  # [M] whether the drawn token is used
    keep: np.ndarray  # [M] flat token of each row of logits


class StepInputs(NamedTuple, Generic[Data]):
    """Inputs of a forward without CUDA graph. U of the N tokens are computed: all of them, unless twins are merged."""

    tokens: Data  # [U]
    positions: Data  # [U]
    where: Data  # [N] flat cache positions to write
    keep: Data  # [L] computed tokens whose logits are needed; L = M without twins
    source: Data  # [N] the computed token for each token; empty without twins
    logit_rows: Data  # [M] the row of logits for each draw; empty without twins
    dense_pad: Data  # [P * T] `Part.pad` and `Part.unpad` of the dense part; empty without padding
    dense_unpad: Data  # [n]
    chunk_pad: Data  # [P * T] the same of the chunks
    chunk_unpad: Data  # [n]


class SampledTokens(NamedTuple):
    """New tokens, ordered by slot and position."""

    slots: np.ndarray
    places: np.ndarray  # positions in their slot's sequence
    tokens: np.ndarray
    logprobs: np.ndarray


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


class Runner:
    """Owns the view of the model and the cache. Runs in inference mode, in the caller's thread."""

    def __init__(self, model: PreTrainedModel, table: SlotTable) -> None:
        check_model(model)
        self.model, self.table = model, table
        embeddings: Any = model.get_input_embeddings()
        self.vocabulary: int = embeddings.num_embeddings
        self.device: torch.device = embeddings.weight.device
        self.kind = model.config.model_type
        self._fused_kind: Callable[[torch.nn.Module], type[torch.nn.Module] | None] | None = None
        self.refresh()
        self.shapes = self._shapes()
        self.dtype = self.shapes[0].dtype
        self.full = round_up(table.max_length, 64)
        self.cache: SlotCache | None = None
        self._span = torch.arange(max(self.full, 64), device=self.device)
        self._seen = torch.zeros((), dtype=self.dtype, device=self.device)
        self._hidden = torch.full((), -torch.inf, dtype=self.dtype, device=self.device)
        same_sizes = all(shape.key_size == shape.value_size for shape in self.shapes)
        self._fused = same_sizes and self.device.type == "cpu"  # the CPU's fused kernel supports these layers
        self.ahead = False  # steps are launched before the tokens of the previous step are known
        self._trunks: dict[tuple[int, bytes], int] = {}
        self._latest = torch.zeros(table.slots + 1, dtype=torch.long, device=self.device)  # by slot
        self._graphs = DecodeGraphs(self.device, self._latest) if self.device.type == "cuda" else None
        self._prepare()
        self._compare()

    def _prepare(self) -> None:
        """Choose the kernels for the known shapes."""

    def refresh(self) -> None:
        """Rebuild the view of the model, whose adapters or modules may have changed."""
        self.view = shared_view(self.model, ATTENTION, self._fused_kind)
        self._moved = True  # the addresses in CUDA graphs may be stale

    @torch.inference_mode()
    def _shapes(self) -> list[LayerShape]:
        """Run two tokens through the model to get the shapes of its layers; raise ValueError if it is unsupported."""
        step, ids = StepContext(), torch.zeros(2, dtype=torch.long, device=self.device)
        self._logits(ids, ids, step, 0)
        layers = self.model.config.get_text_config().num_hidden_layers
        if len(step.shapes) != layers:
            raise unsupported_model(
                self.kind, f"{len(step.shapes)} of its {layers} layers use the attention interface"
            )
        return step.shapes

    @torch.inference_mode()
    def _compare(self) -> None:
        """Raise ValueError if the logits of a chunk or of dense rows differ from those of the model's own attention at
        most tokens. At a few tokens, the 16-bit logits of a trained model differ much for any order of summation."""
        ids = (self._span[:15] + 1000) % self.vocabulary  # the first ids are special tokens
        expected = shared_view(self.model, "eager")(input_ids=ids[None], use_cache=False).logits[0].float()
        cache, logits = SlotCache(1, 64, self.shapes), []
        for at in self._span[:15].split([8] + 7 * [1]):
            part = AttentionPart(slice(0, 1), self._mask(at[None], 64), 64)
            parts: Any = {"dense": part, "tokens": 1} if len(at) == 1 else {"chunks": part}
            logits.append(self._logits(ids[at], at, self._tile(StepContext(cache, at, **parts), at), 0))
        errors = (torch.cat(logits).float() - expected).abs().mean(1) / expected.std(1).clamp(min=1e-6)
        error = max(float(part.median()) for part in errors.split([8, 7]))
        if not error < (0.01 if self.dtype == torch.float32 else 0.1):
            raise unsupported_model(
                self.kind, f"its logits through the slot cache are off by {error:.1%} of their spread"
            )

    def _tile(self, step: StepContext, at: torch.Tensor) -> StepContext:
        """Prepare the step of `_compare` for the kernels, in subclasses that have them."""
        return step

    # -- cache

    def reserve(self, length: int) -> SlotCache:
        """Return the cache, after growing it for sequences of this length if necessary. It grows by doubling."""
        length = min(round_up(length, 128), self.full)
        if self.cache is None or length > self.cache.capacity:
            self._moved = True
        if self.cache is None:
            start = self.full if self.table.deterministic else min(self.full, max(512, length))
            self.cache = SlotCache(self.table.slots, start, self.shapes)
        if length > self.cache.capacity:
            self.cache.grow(min(self.full, max(length, 2 * self.cache.capacity)))
        return self.cache

    @torch.inference_mode()
    def copy(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        """Copy keys and values from the first to the second slot of each pair, reading all before writing any."""
        cache = self.reserve(length)
        sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
        cache.copy(sources, targets, min(round_up(length, 64), cache.capacity))

    def width(self, length: int) -> int:
        """Return the number of cached positions that attention reads for sequences of this length."""
        if not self.table.deterministic:
            # few widths on a GPU, because each has a graph
            return min(round_up(length, 128 if self.device.type == "cuda" else 64), self.full)
        # The CPU's kernel processes blocks of 512 keys, and fully masked blocks add exact zeros.
        return min(round_up(length, 512), self.full) if self._fused else self.full

    def trunk(self, slots: np.ndarray) -> int:
        """Return the length of the slots' shared prefix; 0 if reading it only once does not pay."""
        if len(slots) < 4 or self.table.deterministic or not self._fused:
            return 0
        key = (self.table.changes, slots.tobytes())
        if key not in self._trunks:
            if len(self._trunks) > 8:
                self._trunks.clear()
            common = self.table.trunk(slots) // 32 * 32
            self._trunks[key] = common if common >= 64 else 0
        return self._trunks[key]

    # -- one forward

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> SampledTokens:
        """Run the plan and advance the table's `stored`. The caller appends the new tokens to the table."""
        flat, picked = self._begin(plan)
        return self._settle(plan, flat, picked)

    def _begin(self, plan: StepPlan) -> tuple[FlatBatch, torch.Tensor | None]:
        table = self.table
        stored, guessed = table.stored, plan.guessed if plan.guesses is not None else 0
        dense_end = int((stored[plan.dense] + guessed).max()) + 1 if len(plan.dense) else 0
        chunk_end = int((stored[plan.slots] + plan.counts).max()) if len(plan.slots) else 0
        cache = self.reserve(max(dense_end, chunk_end) + plan.twice)
        return self._feed(plan, cache, dense_end, chunk_end)

    def _feed(
        self, plan: StepPlan, cache: SlotCache, dense_end: int, chunk_end: int
    ) -> tuple[FlatBatch, torch.Tensor | None]:
        trunk = self.trunk(plan.dense)
        flat = self._flat(plan, cache, trunk)
        draws = self._draws(flat)
        widths = self.width(dense_end), self.width(chunk_end)
        picked = None
        if self._graphs is not None and not len(plan.slots) and not draws.filters:
            picked = self._replay(plan, cache, flat, draws, widths[0])
        if picked is None:
            picked = self._forward(plan, flat, StepContext(cache=cache), draws, widths, trunk)
        return flat, picked

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replace the ids of in-flight tokens, which the host does not know, by the tokens on the device."""
        return torch.where(tokens < 0, self._latest[(-1 - tokens).clamp_(min=0)], tokens)

    def _forward(
        self, plan: StepPlan, flat: FlatBatch, step: StepContext, draws: DrawInputs[np.ndarray],
        widths: tuple[int, int], trunk: int,
    ) -> torch.Tensor | None:  # fmt: skip
        """Return tokens and log-probs [2, M]; None if no drawn token is used."""
        twins = self._twins(plan, flat)
        merged = plan if twins is None else _leaders_only(plan, twins)
        rows, fed = slice(0, plan.rows), flat.fed
        if not plan.fixed:
            rows, fed = _covered(merged.dense, flat.fed[merged.dense])
        chunks, counts = _covered(merged.slots, merged.counts)
        arrays = _step_inputs(flat, twins, fed, counts)
        tensors = to_device([*arrays, *draws.present], self.device)
        inputs = StepInputs(*tensors[: len(arrays)])
        step.where, step.tokens = inputs.where, int(fed.sum())
        step.source = inputs.source if twins is not None else None
        if plan.rows:
            positions = inputs.positions[: step.tokens]
            step.dense = self._part(rows, positions, inputs.dense_pad, inputs.dense_unpad, widths[0])
            step.dense.trunk, step.dense.trunk_slot = trunk, int(merged.dense[0])
        if len(merged.slots):
            positions = inputs.positions[step.tokens :]
            step.chunks = self._part(chunks, positions, inputs.chunk_pad, inputs.chunk_unpad, widths[1])
            step.chunks.trunk, step.chunks.trunk_slot = self.trunk(merged.slots), int(merged.slots[0])
        ids = inputs.tokens if not self.table.flying.any() else self._known(inputs.tokens)
        logits = self._logits(ids, inputs.positions, step, inputs.keep if len(plan.slots) else 0)
        if not flat.live.any():
            return None
        drawn = DrawInputs(*tensors[len(arrays) :])
        logit_rows = inputs.logit_rows if twins is not None else None
        picked = pick(logits, drawn.uniform, drawn.temperature, drawn.filters, logit_rows)
        if self.ahead:
            self._latest[flat.rows[flat.live]] = picked[0, flat.live].long()
        return picked

    def _twins(self, plan: StepPlan, flat: FlatBatch) -> TwinRows | None:
        rows = np.concatenate((plan.dense, plan.slots))
        if plan.fixed or len(rows) < 2:  # with fixed shapes, a row less saves nothing
            return None
        counts = np.concatenate((flat.fed[plan.dense], plan.counts))
        return find_twins(self.table.hashes[rows], self.table.marks(flat.tokens, flat.positions), counts)

    def _logits(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext, keep: torch.Tensor | int
    ) -> torch.Tensor:
        """Return the logits [M, V] of the tokens `keep`, or of all tokens if it is 0."""
        result = self.view(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, tfactory_step=step,
            logits_to_keep=keep,
        )  # fmt: skip
        return result.logits[0]

    def _replay(
        self, plan: StepPlan, cache: SlotCache, flat: FlatBatch, draws: DrawInputs[np.ndarray], width: int
    ) -> torch.Tensor | None:
        """Run a plan that only decodes, without filters, as a CUDA graph; None if it cannot be recorded."""
        assert self._graphs is not None
        arrays = [flat.tokens, flat.positions, flat.where, flat.keep, *draws.present]

        def step(tensors: list[torch.Tensor]) -> torch.Tensor:
            ids, positions, where, _, *draw_tensors = tensors
            draws = DrawInputs(*draw_tensors)
            mask = self._mask(positions.unflatten(0, (plan.rows, -1)), width)
            part = AttentionPart(slice(0, plan.rows), mask, width)
            context = StepContext(cache=cache, where=where, dense=part, tokens=len(ids))
            return pick(self._logits(ids, positions, context, 0), draws.uniform, draws.temperature)

        self._check_graphs(cache)
        return self._graphs.run((plan.rows, plan.span, width, len(arrays)), arrays, step)

    def _check_graphs(self, cache: SlotCache) -> None:
        if self._moved and self._graphs is not None:
            self._graphs.check(self.model, [layer.keys for layer in cache.layers])
            self._moved = False

    def _settle(self, plan: StepPlan, flat: FlatBatch, picked: torch.Tensor | None) -> SampledTokens:
        """Return the tokens that were drawn after correct guesses only, and advance the table's `stored`."""
        table, live = self.table, flat.live
        tokens, logprobs = split_picked(picked, live)
        fresh: np.ndarray | int = 1
        if plan.guesses is not None:
            live = live & _accepted(flat, tokens, table.stops)
            dense = int(flat.fed.sum())
            drawn = np.bincount(flat.rows[:dense][live[:dense]], minlength=plan.rows)[plan.dense]
            reply = table.known[plan.dense] - table.stored[plan.dense] > 1
            fresh = np.where(reply, plan.guessed + 1, drawn)
        table.advance(plan.dense, fresh)
        if len(plan.slots):
            table.advance(plan.slots, plan.counts)
        rows = flat.rows[live]
        return SampledTokens(
            rows, table.known[rows] + flat.offsets[live], tokens[live], require_finite(logprobs[live])
        )

    def _flat(
        self, plan: StepPlan, cache: SlotCache, trunk: int, layout: TileLayout | None = None
    ) -> FlatBatch:
        # Padding feeds token 0, at the position after the shared prefix, to the scratch slot, which nobody reads.
        table, capacity = self.table, cache.capacity
        fed = np.full(plan.rows, int(plan.fixed))
        fed[plan.dense] = 1
        if plan.guesses is not None:
            fed[plan.dense] += plan.guessed
            fed = np.full(plan.rows, plan.span) if plan.span else fed
        start = int(fed.sum())
        size = start + (CHUNK if table.deterministic and len(plan.slots) else int(plan.counts.sum()))
        size = size if layout is None else start + layout.extra
        tokens, positions = np.zeros(size, np.int64), np.full(size, trunk)
        where = np.full(size, cache.slots * capacity)
        first = fed.cumsum() - fed  # [R] flat index of each row's first token
        at, place = table.stored[plan.dense], first[plan.dense]
        tokens[place] = table.ids[plan.dense, at]
        positions[place] = at
        where[place] = plan.dense * capacity + at
        if plan.guesses is not None:
            row, column = np.nonzero(np.arange(plan.guesses.shape[1]) < plan.guessed[:, None])
            guess = place[row] + 1 + column
            tokens[guess] = plan.guesses[row, column]
            positions[guess] = at[row] + 1 + column
            where[guess] = plan.dense[row] * capacity + positions[guess]
        if len(plan.slots):
            start = int(table.stored[plan.slots[0]]) % CHUNK if table.deterministic else start
            slot, before = np.repeat(plan.slots, plan.counts), plan.counts.cumsum() - plan.counts
            at = table.stored[slot] + np.arange(len(slot)) - np.repeat(before, plan.counts)
            part = slice(start, start + len(slot))
            tokens[part], positions[part], where[part] = table.ids[slot, at], at, slot * capacity + at
        logit_rows = self._logit_rows(plan, fed, first)
        if layout is not None and layout.recorded:  # pad the rows of logits to the shape of the graph
            rows = int(fed.sum()) + layout.pieces
            logit_rows = [pad_to(array, rows) for array in logit_rows]
        return FlatBatch(tokens, positions, where, fed, *logit_rows)

    def _logit_rows(
        self, plan: StepPlan, fed: np.ndarray, first: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return rows, offsets, live and keep of a `Flat`, for all dense tokens and the last tokens of prompts."""
        table = self.table
        behind = np.zeros(plan.rows, np.int64)  # [R] known tokens after the row's first fed token
        behind[plan.dense] = table.known[plan.dense] - table.stored[plan.dense] - 1
        if plan.fixed and plan.guesses is None and not len(plan.slots):  # one token per row
            live = np.zeros(plan.rows, bool)
            live[plan.dense] = behind[plan.dense] == 0
            return first, -behind, live, first
        most = np.full(plan.rows, -1)  # [R] largest offset whose drawn token is used
        most[plan.dense] = (0 if plan.guesses is None else plan.guessed) - behind[plan.dense]
        rows = np.repeat(np.arange(plan.rows), fed)
        keep = np.arange(len(rows))
        offsets = keep - np.repeat(first + behind, fed)
        live = (offsets >= 0) & (offsets <= most[rows])
        if not len(plan.slots):
            return rows, offsets, live, keep
        ended = np.flatnonzero(table.stored[plan.slots] + plan.counts == table.known[plan.slots])
        return (
            np.concatenate((rows, plan.slots[ended])),
            np.concatenate((offsets, np.zeros(len(ended), np.int64))),
            np.concatenate((live, np.ones(len(ended), bool))),
            np.concatenate((keep, len(rows) + plan.counts.cumsum()[ended] - 1)),
        )

    def _part(
        self, slots: slice | np.ndarray, positions: torch.Tensor, pad: torch.Tensor, unpad: torch.Tensor, width: int
    ) -> AttentionPart:  # fmt: skip
        rows = slots.stop - slots.start if isinstance(slots, slice) else len(slots)
        padded = len(pad) > 0
        positions = (positions[pad] if padded else positions).unflatten(0, (rows, -1))
        where = slots if isinstance(slots, slice) else torch.from_numpy(slots).to(self.device)
        mask = self._mask(positions, width)
        return AttentionPart(where, mask, width, pad, unpad) if padded else AttentionPart(where, mask, width)

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Return the causal mask of positions [rows, T], additive, as [rows, 1, T, width]."""
        hidden = self._span[:width] > positions[:, None, :, None]
        return torch.where(hidden, self._hidden, self._seen)

    def _draws(self, flat: FlatBatch) -> DrawInputs[np.ndarray]:
        table, rows, live = self.table, flat.rows, flat.rows[flat.live]
        uniform = uniforms(table.seed[rows], table.known[rows] + flat.offsets)
        if (table.top_p[live] < 1).any() or table.top_k[live].any() or table.min_p[live].any():
            filters = table.top_p[rows], table.top_k[rows], table.min_p[rows]
            return DrawInputs(uniform, table.temperature[rows], *filters)
        scaled = not (table.temperature[live] == 1).all()
        return DrawInputs(uniform, table.temperature[rows] if scaled else None)


def _leaders_only(plan: StepPlan, twins: TwinRows) -> StepPlan:
    dense, chunks = twins.leaders[: len(plan.dense)], twins.leaders[len(plan.dense) :]
    return replace(plan, dense=plan.dense[dense], slots=plan.slots[chunks], counts=plan.counts[chunks])


def _step_inputs(
    flat: FlatBatch, twins: TwinRows | None, fed: np.ndarray, counts: np.ndarray
) -> StepInputs[np.ndarray]:
    """Return the inputs of a forward; `fed` and `counts` [rows] are the tokens of each dense row and of each chunk."""
    padding = *_padding(fed), *_padding(counts)
    if twins is None:
        return StepInputs(flat.tokens, flat.positions, flat.where, flat.keep, EMPTY, EMPTY, *padding)
    keep, logit_rows = np.unique(twins.source[flat.keep], return_inverse=True)
    tokens, positions = flat.tokens[twins.kept], flat.positions[twins.kept]
    return StepInputs(tokens, positions, flat.where, keep, twins.source, logit_rows, *padding)


def _covered(slots: np.ndarray, counts: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray]:
    """Return all slots from the first to the last as a slice, with the tokens of each, if these are few more than the
    given slots: a slice of the cache needs no copy."""
    if not len(slots) or slots[-1] - slots[0] + 1 > 1.5 * len(slots):
        return slots, counts
    first, end = int(slots[0]), int(slots[-1]) + 1
    covered = np.zeros(end - first, np.int64)
    covered[slots - first] = counts
    return slice(first, end), covered


def _padding(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the token at each position of the padded [rows, longest], flattened, and the padded position of each
    token; both empty if all rows have the same length."""
    if not len(counts) or (counts == counts[0]).all():
        return EMPTY, EMPTY
    columns = np.arange(counts.max())
    starts = counts.cumsum() - counts
    pad = starts[:, None] + np.minimum(columns, counts[:, None] - 1)
    return np.maximum(pad.ravel(), 0), np.flatnonzero(columns < counts[:, None])


def _accepted(flat: FlatBatch, drawn: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return [M] whether all guesses before a row of logits equal the tokens drawn there, and none is a stop token."""
    rejected = np.zeros(len(drawn), bool)
    guesses = np.flatnonzero(flat.offsets > 0)
    expected = drawn[guesses - 1]
    is_stop = (stops[flat.rows[guesses]] == expected[:, None]).any(1)
    rejected[guesses] = (flat.tokens[guesses] != expected) | is_stop
    first = np.full(len(stops), len(drawn))  # [S] offset of each slot's first rejected guess
    np.minimum.at(first, flat.rows[rejected], flat.offsets[rejected])
    return flat.offsets < first[flat.rows]
