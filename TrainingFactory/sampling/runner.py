"""Execution of one forward: from the table's arrays to tensors, through the model, to tokens and log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.common.image_tokens import VIRTUAL
from TrainingFactory.sampling.batches import (
    FlatBatch,
    GraphInputs,
    SampledTokens,
    StepInputs,
    covered,
    leaders_only,
    step_inputs,
)
from TrainingFactory.sampling.cache.attention import AttentionPart, StepContext
from TrainingFactory.sampling.cache.pages import PAGE, CachePages
from TrainingFactory.sampling.cache.states import ModelStates, StateCache, StateRows, chunk_rows, dense_rows
from TrainingFactory.sampling.cache.store import LayerShape, PagedCache, free_memory, layer_windows
from TrainingFactory.sampling.cache.view import (
    ATTENTION,
    check_model,
    has_state_or_keys,
    shared_view,
    unsupported_model,
)
from TrainingFactory.sampling.flattening import (
    flatten_plan,
    make_draw_inputs,
    rotary_positions,
    settle_draws,
)
from TrainingFactory.sampling.gpu.graphs import DecodeGraphs, to_device
from TrainingFactory.sampling.picking import DrawInputs, pick
from TrainingFactory.sampling.planning import EMPTY, StepPlan
from TrainingFactory.sampling.sizing import round_up, size_cache, size_states
from TrainingFactory.sampling.table import CHUNK, SlotTable
from TrainingFactory.sampling.twins import TwinRows, find_twins

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision


class Runner:
    """Runs the engine's forwards in inference mode, in the caller's thread. It owns the cache and the view of the
    model, a second module tree over the same weights."""

    def __init__(
        self,
        model: PreTrainedModel,
        table: SlotTable,
        cache_bytes: int | None = None,
        vision: Vision | None = None,
    ) -> None:
        check_model(model)
        self.model, self.table, self.vision = model, table, vision
        embeddings: Any = model.get_input_embeddings()
        self.vocabulary: int = embeddings.num_embeddings
        self.device: torch.device = embeddings.weight.device
        self.kind = model.config.model_type
        self._fused_kind: Callable[[torch.nn.Module], type[torch.nn.Module] | None] | None = None
        self.states = ModelStates()  # of recurrent layers
        self.refresh()
        self.shapes = self._probe_layer_shapes()
        self.dtype = self.shapes[0].dtype
        memory = free_memory(self.device) if cache_bytes is None else cache_bytes
        memory = size_states(table, self.states.shapes, memory)
        size_cache(table, self.shapes, memory, lazy=cache_bytes is None and self.device.type == "cpu")
        self.full = round_up(table.max_length, 64)
        self.cache: PagedCache | None = None
        self._span = torch.arange(max(self.full, 64), device=self.device)
        self._seen = torch.zeros((), dtype=self.dtype, device=self.device)
        self._hidden = torch.full((), -torch.inf, dtype=self.dtype, device=self.device)
        supported = all(shape.key_size == shape.value_size for shape in self.shapes)
        self._fused = supported and self.device.type == "cpu"  # the CPU's fused kernel supports these layers
        self.launches_ahead = False  # steps are launched before the tokens of the previous step are known
        self._trunks: dict[tuple[int, bytes], int] = {}
        self._latest = torch.zeros(table.slots + 1, dtype=torch.long, device=self.device)  # by slot
        self._ended = torch.zeros(
            table.slots + 1, dtype=torch.bool, device=self.device
        )  # `_latest` follows a stop
        self._graphs = DecodeGraphs(self.device) if self.device.type == "cuda" else None
        self._choose_kernels()
        self._compare_logits()

    def _choose_kernels(self) -> None:
        """Choose the kernels that fit the recorded layer shapes. Subclasses override this."""

    def refresh(self) -> None:
        """Rebuild the view of the model, because the model's adapters or modules may have changed."""
        self.view = shared_view(self.model, ATTENTION, self._fused_kind)
        self.states.attach(self.view)
        self._moved = True  # the addresses in CUDA graphs may be stale

    @torch.inference_mode()
    def _probe_layer_shapes(self) -> list[LayerShape]:
        """Run two tokens through the model to get the shapes of its layers; raise ValueError if it is unsupported."""
        step, ids = StepContext(), torch.zeros(2, dtype=torch.long, device=self.device)
        self._compute_logits(ids, ids, step, 0)
        layers = has_state_or_keys(self.model)
        seen = {shape.layer for shape in (*step.shapes, *self.states.shapes)}
        if not step.shapes or seen != layers:
            raise unsupported_model(
                self.kind,
                f"{len(step.shapes)} of its {len(layers)} layers use the attention interface, and "
                f"{len(self.states.shapes)} are recurrent",
            )
        return step.shapes

    @torch.inference_mode()
    def _compare_logits(self) -> None:
        """Raise ValueError if, for the majority of tokens, the logits of a chunk or of dense rows differ from the
        logits with the model's own attention. Differences at a few tokens are accepted, because the 16-bit logits of a
        trained model depend much on the order of summation there."""
        ids = (self._span[:15] + 1000) % self.vocabulary  # the first ids are special tokens
        expected = shared_view(self.model, "eager")(input_ids=ids[None], use_cache=False).logits[0].float()
        windows = layer_windows(self.shapes)
        cache = PagedCache(CachePages(1, 64, windows, [64 // PAGE] * len(windows), fixed=True), self.shapes)
        states, logits = StateCache(self.states.shapes, 1), []
        for positions in self._span[:15].split([8] + 7 * [1]):
            part = AttentionPart(slice(0, 1), positions[None], 64, self._make_attention_mask)
            parts: Any = {"dense": part, "tokens": 1} if len(positions) == 1 else {"chunks": part}
            row = StateRows(slice(0, len(positions)), slice(0, 1), 1, is_new=int(positions[0]) == 0)
            self.states.begin(states, [row])
            step = StepContext(cache, positions.expand(len(windows), -1), **parts)
            logits.append(
                self._compute_logits(ids[positions], positions, self._tile_comparison(step, positions), 0)
            )
        errors = (torch.cat(logits).float() - expected).abs().mean(1) / expected.std(1).clamp(min=1e-6)
        error = max(float(errors_of_part.median()) for errors_of_part in errors.split([8, 7]))
        if not error < (0.01 if self.dtype == torch.float32 else 0.1):
            raise unsupported_model(
                self.kind, f"its logits through the slot cache are off by {error:.1%} of their spread"
            )

    def _tile_comparison(self, step: StepContext, positions: torch.Tensor) -> StepContext:
        """Return the step of `_compare_logits`. Subclasses with GPU kernels add the kernels' inputs."""
        return step

    # -- cache

    def current_cache(self) -> PagedCache:
        """Return the cache, with the device's page tables up to date. The first call allocates it."""
        is_new = self.cache is None
        if self.cache is None:
            self._moved = True
            self.cache = PagedCache(self.table.pages, self.shapes)
        self.cache.upload()
        self.states.prepare(self.table.snapshots, allocate=is_new)
        return self.cache

    @torch.inference_mode()
    def copy_pages(self) -> None:
        """Execute the pending page copies of the slot table."""
        self.current_cache().copy_pages()

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
        batch, picked = self._begin(plan)
        return settle_draws(self.table, plan, batch, picked)

    def _begin(self, plan: StepPlan) -> tuple[FlatBatch, torch.Tensor | None]:
        table = self.table
        stored_lengths, guessed = table.stored, plan.guessed if plan.guesses is not None else 0
        dense_end = int((stored_lengths[plan.dense] + guessed).max()) + 1 if len(plan.dense) else 0
        chunk_end = int((stored_lengths[plan.slots] + plan.counts).max()) if len(plan.slots) else 0
        return self._feed_tokens(plan, self.current_cache(), dense_end, chunk_end)

    def _feed_tokens(
        self, plan: StepPlan, cache: PagedCache, dense_end: int, chunk_end: int
    ) -> tuple[FlatBatch, torch.Tensor | None]:
        trunk = self.trunk(plan.dense)
        batch = flatten_plan(self.table, plan, trunk)
        draws = make_draw_inputs(self.table, batch)
        widths = self.width(dense_end), self.width(chunk_end)
        picked = None
        is_recorded = self._graphs is not None and not len(plan.slots) and not draws.filters
        if is_recorded and not self._shows_images(batch):
            picked = self._replay_graph(plan, cache, batch, draws, widths[0])
        if picked is None:
            picked = self._forward_and_draw(plan, batch, StepContext(cache=cache), draws, widths, trunk)
        return batch, picked

    def _shows_images(self, batch: FlatBatch) -> bool:
        """Return whether the step feeds image tokens. Such a step cannot run as a CUDA graph, because graphs do not
        record the embeddings of images."""
        return self.vision is not None and bool((batch.tokens >= VIRTUAL).any())

    def _fill_in_flight_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replace the ids of in-flight tokens, which the host does not know, by the tokens on the device."""
        return torch.where(tokens < 0, self._latest[(-1 - tokens).clamp_(min=0)], tokens)

    def _forward_and_draw(
        self, plan: StepPlan, batch: FlatBatch, step: StepContext, draws: DrawInputs[np.ndarray],
        widths: tuple[int, int], trunk: int,
    ) -> torch.Tensor | None:  # fmt: skip
        """Return tokens and log-probs [2, M]; None if no drawn token is used."""
        twin_rows = self._find_twin_rows(plan, batch)
        merged = plan if twin_rows is None else leaders_only(plan, twin_rows)
        if self.states.cache is not None:
            dense = batch.slots[: int(batch.fed.sum())]
            own = [dense_rows(dense, self.table.slots, self.device)] if len(dense) else []
            self.states.begin(self.states.cache, [*own, *self._chunk_rows(plan, len(dense))])
        rows, fed = slice(0, plan.rows), batch.fed
        if not plan.fixed:
            rows, fed = covered(merged.dense, batch.fed[merged.dense])
        chunks, counts = covered(merged.slots, merged.counts)
        rope = (
            EMPTY
            if self.table.rope_of is None
            else rotary_positions(self.table, batch.slots, batch.positions)
        )
        arrays = step_inputs(batch, self._cache_positions(batch), twin_rows, fed, counts, rope)
        images: dict[str, Any] = {}
        if self.vision is not None:
            if self.vision.sees_whole_images:
                arrays = arrays._replace(ends=self.vision.image_ends(arrays.tokens, arrays.positions))
            ids, images = self.vision.model_inputs(self.model, arrays.tokens[None])
            arrays = arrays._replace(tokens=ids[0])
        tensors = to_device([*arrays, *draws.present], self.device)
        inputs = StepInputs(*tensors[: len(arrays)])
        step.cache_positions = inputs.cache_positions.unflatten(0, (len(self.table.pages.tables), -1))
        step.tokens = int(fed.sum())
        step.source = inputs.source if twin_rows is not None else None
        if plan.rows:
            part = slice(0, step.tokens)
            step.dense = self._make_attention_part(
                rows, inputs, part, (inputs.dense_pad, inputs.dense_unpad), widths[0]
            )
            step.dense.trunk, step.dense.trunk_slot = trunk, int(merged.dense[0])
        if len(merged.slots):
            part = slice(step.tokens, None)
            step.chunks = self._make_attention_part(
                chunks, inputs, part, (inputs.chunk_pad, inputs.chunk_unpad), widths[1]
            )
            step.chunks.trunk, step.chunks.trunk_slot = self.trunk(merged.slots), int(merged.slots[0])
        ids = inputs.tokens if not self.table.flying.any() else self._fill_in_flight_tokens(inputs.tokens)
        positions = inputs.rope.unflatten(0, (3, -1)) if len(rope) else inputs.positions
        logits = self._compute_logits(ids, positions, step, inputs.keep if len(plan.slots) else 0, images)
        if not batch.live.any():
            return None
        draw_inputs = DrawInputs(*tensors[len(arrays) :])
        logit_rows = inputs.logit_rows if twin_rows is not None else None
        picked = pick(logits, draw_inputs.uniform, draw_inputs.temperature, draw_inputs.filters, logit_rows)
        if self.launches_ahead:
            self._latest[batch.rows[batch.live]] = picked[0, batch.live].long()
        return picked

    def _chunk_rows(self, plan: StepPlan, dense: int) -> list[StateRows]:
        """Return the rows that recurrent layers prefill, after `dense` tokens of decoding rows."""
        starts = self.table.stored[plan.slots]
        begin = int(starts[0]) % CHUNK if self.table.deterministic and len(starts) else dense
        return chunk_rows(plan.slots, plan.counts, starts, begin, self.device)

    def _make_graph_inputs(
        self, tokens: np.ndarray, slots: np.ndarray, positions: np.ndarray, dense: int, rows: np.ndarray,
        live: np.ndarray, keep: np.ndarray = EMPTY,
    ) -> GraphInputs[np.ndarray]:  # fmt: skip
        """Return the inputs of a forward that feeds the tokens [N] to `slots` [N] and draws for the slots `rows` [M].
        The first `dense` tokens belong to decoding rows."""
        table = self.table
        cache_positions = table.pages.locate(slots, positions).ravel()
        rope = (
            EMPTY
            if table.rope_of is None
            else rotary_positions(self.table, slots, positions).T.ravel().astype(np.int64)
        )
        inputs = GraphInputs(
            tokens, positions, cache_positions, keep, np.where(live, rows, table.slots), rope, EMPTY, EMPTY
        )
        if not self.states.shapes:
            return inputs
        return inputs._replace(state_slots=slots[:dense], stops=table.stops[rows].ravel())

    def _enter_states(self, inputs: GraphInputs[torch.Tensor], chunks: Sequence[StateRows] = ()) -> None:
        """Prepare the states of the recurrent layers for a forward: those of its decoding rows, then those of its
        chunks. A row whose turn has ended on the device keeps its state, although the host still feeds it a token
        because it does not know the stop token yet."""
        if self.states.cache is None:
            return
        count = len(inputs.state_slots)
        in_flight = inputs.tokens[:count] < 0
        ended = self._ended.index_select(0, inputs.state_slots) & in_flight
        self._ended.index_copy_(0, inputs.state_slots, ended)
        slots = torch.where(ended, self.table.slots, inputs.state_slots)
        own = [StateRows(slice(0, count), slots, count)] if count else []
        self.states.begin(self.states.cache, [*own, *chunks])

    def _leave_states(self, inputs: GraphInputs[torch.Tensor], drawn: torch.Tensor) -> None:
        """Record on the device which of the drawn tokens [M] end their turn."""
        if self.states.cache is not None:
            is_stop = (inputs.stops.unflatten(0, (len(drawn), -1)) == drawn[:, None]).any(1)
            ended = is_stop | self._ended.index_select(0, inputs.target_slots)
            self._ended.index_copy_(0, inputs.target_slots, ended)

    def _select_rotary_input(self, inputs: GraphInputs[torch.Tensor]) -> torch.Tensor:
        return inputs.rope.unflatten(0, (3, -1)) if len(inputs.rope) else inputs.positions

    def _find_twin_rows(self, plan: StepPlan, batch: FlatBatch) -> TwinRows | None:
        rows = np.concatenate((plan.dense, plan.slots))
        if plan.fixed or len(rows) < 2 or self.states.shapes:  # with fixed shapes, a row less saves nothing
            return None
        counts = np.concatenate((batch.fed[plan.dense], plan.counts))
        return find_twins(self.table.hashes[rows], self.table.marks(batch.tokens, batch.positions), counts)

    def _compute_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext, keep: torch.Tensor | int,
        images: dict[str, Any] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the logits [M, V] of the tokens `keep`, or of all tokens if it is 0. `positions` [N] or [3, N];
        `images` are the arguments of the forward for the images among the tokens."""
        result = self.view(
            input_ids=ids[None], position_ids=positions.unsqueeze(-2), use_cache=False, tfactory_step=step,
            logits_to_keep=keep, **(images or {}),
        )  # fmt: skip
        return result.logits[0]

    def _replay_graph(
        self, plan: StepPlan, cache: PagedCache, batch: FlatBatch, draws: DrawInputs[np.ndarray], width: int
    ) -> torch.Tensor | None:
        """Run a plan that only decodes, without filters, as a CUDA graph; None if it cannot be recorded."""
        assert self._graphs is not None
        inputs = self._make_graph_inputs(
            batch.tokens, batch.slots, batch.positions, len(batch.tokens), batch.rows, batch.live
        )
        tables = len(self.table.pages.tables)

        def step(tensors: list[torch.Tensor]) -> torch.Tensor:
            inputs = GraphInputs(*tensors[: len(GraphInputs._fields)])
            draws = DrawInputs(*tensors[len(inputs) :])
            self._enter_states(inputs)
            rows = inputs.positions.unflatten(0, (plan.rows, -1))
            part = AttentionPart(slice(0, plan.rows), rows, width, self._make_attention_mask)
            targets = inputs.cache_positions.unflatten(0, (tables, -1))
            context = StepContext(cache=cache, cache_positions=targets, dense=part, tokens=len(inputs.tokens))
            logits = self._compute_logits(inputs.tokens, self._select_rotary_input(inputs), context, 0)
            return pick(logits, draws.uniform, draws.temperature)

        self._check_graphs(cache)
        arrays, dry = ([*leg, *draws.present] for leg in (inputs, inputs.dry(self.table.slots)))
        return self._graphs.run((plan.rows, plan.span, width, *map(len, arrays)), arrays, dry, step)

    def _check_graphs(self, cache: PagedCache) -> None:
        if self._moved and self._graphs is not None:
            tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
            tensors += self.states.cache.tensors if self.states.cache is not None else []
            self._graphs.check(self.model, [*tensors, *cache.tables])
            self._moved = False

    def _cache_positions(self, batch: FlatBatch) -> np.ndarray:
        return self.table.pages.locate(batch.slots, batch.positions).ravel()

    def _make_attention_part(
        self, slots: slice | np.ndarray, inputs: StepInputs[torch.Tensor], part: slice,
        padding: tuple[torch.Tensor, torch.Tensor], width: int,
    ) -> AttentionPart:  # fmt: skip
        rows = slots.stop - slots.start if isinstance(slots, slice) else len(slots)
        pad, unpad = padding if len(padding[0]) else (None, None)

        def by_row(tokens: torch.Tensor) -> torch.Tensor:
            return (tokens[part] if pad is None else tokens[part][pad]).unflatten(0, (rows, -1))

        slot_index = slots if isinstance(slots, slice) else torch.from_numpy(slots).to(self.device)
        mask = self._make_attention_mask
        if len(inputs.ends):
            mask = partial(mask, ends=by_row(inputs.ends))
        return AttentionPart(slot_index, by_row(inputs.positions), width, mask, pad, unpad)

    def _make_attention_mask(
        self, positions: torch.Tensor, width: int, window: int | None, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the additive attention mask [rows, 1, T, width] of tokens at `positions` [rows, T]. It is causal, or
        with `ends` each token attends up to its entry in `ends`."""
        if window is None and self.vision is not None and self.vision.whole_in_windows_only:
            ends = None
        span, positions = self._span[:width], positions[:, None, :, None]
        is_masked = span > (positions if ends is None else ends[:, None, :, None])
        if window is not None:
            is_masked = is_masked | (span <= positions - window)
        return torch.where(is_masked, self._hidden, self._seen)
