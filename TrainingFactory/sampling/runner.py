"""Run one forward: from the table's arrays to tensors, through the model, back to tokens and log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.sampling.cache.slots import ATTENTION, Part, Shape, SlotCache, StepContext
from TrainingFactory.sampling.cache.view import check_model, refuse, shared_view
from TrainingFactory.sampling.gpu.graphs import DecodeGraphs, to_device
from TrainingFactory.sampling.picking import finite, pick, split_picked, uniforms
from TrainingFactory.sampling.planning import CHUNK, NONE, Plan
from TrainingFactory.sampling.table import SlotTable
from TrainingFactory.sampling.tiles import Layout, filled
from TrainingFactory.sampling.twins import Twins, find_twins


@dataclass(slots=True)
class Flat:
    """Holds the tokens of a forward, as arrays; and of each row of logits, which of them it is."""

    tokens: np.ndarray  # [N]
    positions: np.ndarray  # [N]
    where: np.ndarray  # [N] cache places
    fed: np.ndarray  # [R] tokens of each dense row
    rows: np.ndarray  # [M] slot
    offsets: np.ndarray  # [M] 0: after the row's last known token; k: after k guesses; under 0: before it
    live: np.ndarray  # [M] whether a token is wanted
    keep: np.ndarray  # [M] the flat token that the logits are of


class Sampled(NamedTuple):
    """Holds new tokens, in the order of slots and places."""

    slots: np.ndarray
    places: np.ndarray  # in their slot's sequence
    tokens: np.ndarray
    logprobs: np.ndarray


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


class Runner:
    """Owns the view of the model and the cache; runs under inference mode, in whichever thread calls it."""

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
        self._fused = same_sizes and self.device.type == "cpu"  # the CPU's fused kernel takes these layers
        self.ahead = False  # steps are launched before the tokens of the last are known
        self._trunks: dict[tuple[int, bytes], int] = {}
        self._latest = torch.zeros(table.slots + 1, dtype=torch.long, device=self.device)  # tokens by slot
        self._graphs = DecodeGraphs(self.device, self._latest) if self.device.type == "cuda" else None
        self._prepare()
        self._compare()

    def _prepare(self) -> None:
        """Choose what runs the steps, now that the shapes are known."""

    def refresh(self) -> None:
        """Look at the model anew: its adapters may have been switched, its modules replaced."""
        self.view = shared_view(self.model, ATTENTION, self._fused_kind)
        self._moved = True  # what CUDA graphs point to may be elsewhere now

    @torch.inference_mode()
    def _shapes(self) -> list[Shape]:
        """Run two tokens through the model to learn the shapes of its layers; refuses what it cannot do."""
        step, ids = StepContext(), torch.zeros(2, dtype=torch.long, device=self.device)
        self._logits(ids, ids, step, 0)
        layers = self.model.config.get_text_config().num_hidden_layers
        if len(step.shapes) != layers:
            raise refuse(self.kind, f"{len(step.shapes)} of its {layers} layers use the attention interface")
        return step.shapes

    @torch.inference_mode()
    def _compare(self) -> None:
        """Refuse a model whose own attention gives something else at most tokens, of a chunk or of rows: at a few, a
        trained model's 16 bits are far off whoever adds them up."""
        ids = (self._span[:15] + 1000) % self.vocabulary  # the first are special tokens
        expected = shared_view(self.model, "eager")(input_ids=ids[None], use_cache=False).logits[0].float()
        cache, found = SlotCache(1, 64, self.shapes), []
        for at in self._span[:15].split([8] + 7 * [1]):
            part = Part(slice(0, 1), self._mask(at[None], 64), 64)
            how: Any = {"dense": part, "tokens": 1} if len(at) == 1 else {"chunks": part}
            found.append(self._logits(ids[at], at, self._tile(StepContext(cache, at, **how), at), 0))
        apart = (torch.cat(found).float() - expected).abs().mean(1) / expected.std(1).clamp(min=1e-6)
        off = max(float(part.median()) for part in apart.split([8, 7]))
        if not off < (0.01 if self.dtype == torch.float32 else 0.1):
            raise refuse(self.kind, f"its logits through the slot cache are off by {off:.1%} of their spread")

    def _tile(self, step: StepContext, at: torch.Tensor) -> StepContext:
        return step  # as it is, where no kernel runs it

    # -- cache

    def reserve(self, length: int) -> SlotCache:
        """Return the cache, with room for sequences of this length. Grows by doubling."""
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
        """Copy keys and values from the first to the second slot of each pair; all are read before any is written."""
        cache = self.reserve(length)
        sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
        cache.copy(sources, targets, min(round_up(length, 64), cache.capacity))

    def width(self, length: int) -> int:
        """Return how many cached positions attention looks at."""
        if not self.table.deterministic:
            # few widths on a GPU, because each has its graph
            return min(round_up(length, 128 if self.device.type == "cuda" else 64), self.full)
        # The CPU's kernel works in blocks of 512 keys, and blocks that are masked whole add exact zeros.
        return min(round_up(length, 512), self.full) if self._fused else self.full

    def trunk(self, slots: np.ndarray) -> int:
        """Return how many leading positions these have in common, where it pays to read them once, else 0."""
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
    def run(self, plan: Plan) -> Sampled:
        """Feed what the plan says, and move the table's `stored` on; the new tokens are the caller's to enter."""
        flat, picked = self._begin(plan)
        return self._settle(plan, flat, picked)

    def _begin(self, plan: Plan) -> tuple[Flat, torch.Tensor | None]:
        table = self.table
        stored, guessed = table.stored, plan.guessed if plan.guesses is not None else 0
        dense_end = int((stored[plan.dense] + guessed).max()) + 1 if len(plan.dense) else 0
        chunk_end = int((stored[plan.slots] + plan.counts).max()) if len(plan.slots) else 0
        cache = self.reserve(max(dense_end, chunk_end) + plan.twice)
        return self._feed(plan, cache, dense_end, chunk_end)

    def _feed(
        self, plan: Plan, cache: SlotCache, dense_end: int, chunk_end: int
    ) -> tuple[Flat, torch.Tensor | None]:
        table, trunk = self.table, self.trunk(plan.dense)
        flat = self._flat(plan, cache, trunk)
        draws = uniforms(table.seed[flat.rows], table.known[flat.rows] + flat.offsets)
        arrays = [flat.tokens, flat.positions, flat.where, flat.keep, draws]
        limits = self._limits(flat.rows[flat.live], flat.rows)
        widths = self.width(dense_end), self.width(chunk_end)
        picked = None
        if self._graphs is not None and not len(plan.slots) and len(limits) < 2:
            picked = self._replay(plan, cache, [*arrays, *limits], widths[0])
        if picked is None:
            picked = self._forward(plan, flat, StepContext(cache=cache), [draws, *limits], widths, trunk)
        return flat, picked

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Put in the tokens that the host does not know yet."""
        return torch.where(tokens < 0, self._latest[(-1 - tokens).clamp_(min=0)], tokens)

    def _forward(
        self, plan: Plan, flat: Flat, step: StepContext, draws: list[np.ndarray], widths: tuple[int, int],
        trunk: int,
    ) -> torch.Tensor | None:  # fmt: skip
        """Return tokens and log-probs [2, M]; None where none is wanted."""
        dense, fed, slots, counts = plan.dense, flat.fed[plan.dense], plan.slots, plan.counts
        tokens, positions, keep, source, again = flat.tokens, flat.positions, flat.keep, NONE, NONE
        if (twins := self._twins(plan, flat)) is not None:
            first, second = twins.leaders[: len(dense)], twins.leaders[len(dense) :]
            dense, fed, slots, counts = dense[first], fed[first], slots[second], counts[second]
            tokens, positions, source = tokens[twins.kept], positions[twins.kept], twins.source
            keep, again = np.unique(source[keep], return_inverse=True)
        rows, fed = (slice(0, plan.rows), flat.fed) if plan.fixed else _covered(dense, fed)
        chunks, counts = _covered(slots, counts)
        arrays = [tokens, positions, flat.where, keep, source, again]
        tensors = to_device([*arrays, *_padding(fed), *_padding(counts), *draws], self.device)
        step.where, step.tokens = tensors[2], int(fed.sum())
        step.source = tensors[4] if twins is not None else None
        if plan.rows:
            step.dense = self._part(rows, tensors[1][: step.tokens], tensors[6:8], widths[0])
            step.dense.trunk, step.dense.trunk_slot = trunk, int(dense[0])
        if len(slots):
            step.chunks = self._part(chunks, tensors[1][step.tokens :], tensors[8:10], widths[1])
            step.chunks.trunk, step.chunks.trunk_slot = self.trunk(slots), int(slots[0])
        ids = tensors[0] if not self.table.flying.any() else self._known(tensors[0])
        logits = self._logits(ids, tensors[1], step, tensors[3] if len(plan.slots) else 0)
        if not flat.live.any():
            return None
        temperature = tensors[11] if len(tensors) > 11 else None
        picked = pick(
            logits, tensors[10], temperature, tensors[12:], tensors[5] if twins is not None else None
        )
        if self.ahead:
            self._latest[flat.rows[flat.live]] = picked[0, flat.live].long()
        return picked

    def _twins(self, plan: Plan, flat: Flat) -> Twins | None:
        rows = np.concatenate((plan.dense, plan.slots))
        if plan.fixed or len(rows) < 2:  # where shapes are fixed, one row less saves nothing
            return None
        counts = np.concatenate((flat.fed[plan.dense], plan.counts))
        return find_twins(self.table.hashes[rows], self.table.marks(flat.tokens, flat.positions), counts)

    def _logits(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext, keep: torch.Tensor | int
    ) -> torch.Tensor:
        """[M, V]"""
        result = self.view(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, tfactory_step=step,
            logits_to_keep=keep,
        )  # fmt: skip
        return result.logits[0]

    def _replay(
        self, plan: Plan, cache: SlotCache, arrays: list[np.ndarray], width: int
    ) -> torch.Tensor | None:
        """Run a plan that only decodes as a CUDA graph; None where that cannot be."""
        assert self._graphs is not None

        def step(tensors: list[torch.Tensor]) -> torch.Tensor:
            ids, positions, where, _, draws, *limits = tensors
            mask = self._mask(positions.unflatten(0, (plan.rows, -1)), width)
            part = Part(slice(0, plan.rows), mask, width)
            context = StepContext(cache=cache, where=where, dense=part, tokens=len(ids))
            return pick(self._logits(ids, positions, context, 0), draws, limits[0] if limits else None)

        self._check_graphs(cache)
        return self._graphs.run((plan.rows, plan.span, width, len(arrays)), arrays, step)

    def _check_graphs(self, cache: SlotCache) -> None:
        if self._moved and self._graphs is not None:
            self._graphs.check(self.model, [layer.keys for layer in cache.layers])
            self._moved = False

    def _settle(self, plan: Plan, flat: Flat, picked: torch.Tensor | None) -> Sampled:
        """Keep what was drawn behind guesses that came true, and move the table's counts on."""
        table, live = self.table, flat.live
        tokens, logprobs = split_picked(picked, live)
        fresh: np.ndarray | int = 1
        if plan.guesses is not None:
            live = live & _came_true(flat, tokens, table.stops)
            dense = int(flat.fed.sum())
            drawn = np.bincount(flat.rows[:dense][live[:dense]], minlength=plan.rows)[plan.dense]
            reply = table.known[plan.dense] - table.stored[plan.dense] > 1
            fresh = np.where(reply, plan.guessed + 1, drawn)
        table.advance(plan.dense, fresh)
        if len(plan.slots):
            table.advance(plan.slots, plan.counts)
        rows = flat.rows[live]
        return Sampled(rows, table.known[rows] + flat.offsets[live], tokens[live], finite(logprobs[live]))

    def _flat(self, plan: Plan, cache: SlotCache, trunk: int, layout: Layout | None = None) -> Flat:
        # Unused places feed token 0, right behind the trunk, to the scratch slot: they touch nothing.
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
        first = fed.cumsum() - fed  # [R] the flat place of a row's first token
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
        wanted = self._wanted(plan, fed, first)
        if layout is not None:  # the rows of logits of a shape that comes back
            rows = int(fed.sum()) + layout.pieces
            wanted = [filled(array, rows) for array in wanted] if layout.recorded else wanted
        return Flat(tokens, positions, where, fed, *wanted)

    def _wanted(
        self, plan: Plan, fed: np.ndarray, first: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return rows, offsets, live and keep of a `Flat`: all dense tokens, and the ends of prompts."""
        table = self.table
        behind = np.zeros(plan.rows, np.int64)  # [R] known tokens that are fed after the row's first
        behind[plan.dense] = table.known[plan.dense] - table.stored[plan.dense] - 1
        if plan.fixed and plan.guesses is None and not len(plan.slots):  # a token each
            live = np.zeros(plan.rows, bool)
            live[plan.dense] = behind[plan.dense] == 0
            return first, -behind, live, first
        most = np.full(plan.rows, -1)  # [R] the last offset at which a token is wanted
        most[plan.dense] = (0 if plan.guesses is None else plan.guessed) - behind[plan.dense]
        rows = np.repeat(np.arange(plan.rows), fed)
        keep = np.arange(len(rows))
        offsets = keep - np.repeat(first + behind, fed)
        live = (offsets >= 0) & (offsets <= most[rows])
        if not len(plan.slots):
            return rows, offsets, live, keep
        done = np.flatnonzero(table.stored[plan.slots] + plan.counts == table.known[plan.slots])
        return (
            np.concatenate((rows, plan.slots[done])),
            np.concatenate((offsets, np.zeros(len(done), np.int64))),
            np.concatenate((live, np.ones(len(done), bool))),
            np.concatenate((keep, len(rows) + plan.counts.cumsum()[done] - 1)),
        )

    def _part(
        self, slots: slice | np.ndarray, positions: torch.Tensor, padding: list[torch.Tensor], width: int
    ) -> Part:
        rows = slots.stop - slots.start if isinstance(slots, slice) else len(slots)
        pad, unpad = padding if len(padding[0]) else (None, None)
        positions = (positions if pad is None else positions[pad]).unflatten(0, (rows, -1))
        where = slots if isinstance(slots, slice) else torch.from_numpy(slots).to(self.device)
        return Part(where, self._mask(positions, width), width, pad, unpad)

    def _mask(self, positions: torch.Tensor, width: int) -> torch.Tensor:
        """Turn positions [rows, T] into an additive mask [rows, 1, T, width]: a token sees what is not after it."""
        hidden = self._span[:width] > positions[:, None, :, None]
        return torch.where(hidden, self._hidden, self._seen)

    def _limits(self, live: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Return temperature, top-p, top-k and min-p of the rows, as far as one that counts has them set."""
        table = self.table
        filters = (table.top_p[live] < 1).any() or table.top_k[live].any() or table.min_p[live].any()
        if not filters and (table.temperature[live] == 1).all():
            return []
        arrays = [table.temperature, table.top_p, table.top_k, table.min_p]
        return [array[rows] for array in (arrays if filters else arrays[:1])]


def _covered(slots: np.ndarray, counts: np.ndarray) -> tuple[slice | np.ndarray, np.ndarray]:
    """Return all slots from the first to the last, and the tokens of each, where these are few more: a slice of the
    cache needs no copy."""
    if not len(slots) or slots[-1] - slots[0] + 1 > 1.5 * len(slots):
        return slots, counts
    first, end = int(slots[0]), int(slots[-1]) + 1
    covered = np.zeros(end - first, np.int64)
    covered[slots - first] = counts
    return slice(first, end), covered


def _padding(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which token fills each place of [rows, longest], and which place each token fills; nothing where all rows
    are of one length."""
    if not len(counts) or (counts == counts[0]).all():
        return NONE, NONE
    columns = np.arange(counts.max())
    starts = counts.cumsum() - counts
    pad = starts[:, None] + np.minimum(columns, counts[:, None] - 1)
    return np.maximum(pad.ravel(), 0), np.flatnonzero(columns < counts[:, None])


def _came_true(flat: Flat, drawn: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return [M] whether all guesses before a row of logits are what was drawn there, and none of them a stop."""
    wrong = np.zeros(len(drawn), bool)
    later = np.flatnonzero(flat.offsets > 0)
    before = drawn[later - 1]
    wrong[later] = (flat.tokens[later] != before) | (stops[flat.rows[later]] == before[:, None]).any(1)
    first = np.full(len(stops), len(drawn))  # [S] the offset of a slot's first wrong guess
    np.minimum.at(first, flat.rows[wrong], flat.offsets[wrong])
    return flat.offsets < first[flat.rows]
