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
    cover_slots,
    make_step_inputs,
    select_leaders,
)
from TrainingFactory.sampling.cache.attention import AttentionPart, StepContext
from TrainingFactory.sampling.cache.pages import PAGE, CachePages
from TrainingFactory.sampling.cache.states import ModelStates, StateCache, StateRows, make_chunks, make_dense
from TrainingFactory.sampling.cache.store import LayerShape, PagedCache, get_free_memory, list_windows
from TrainingFactory.sampling.cache.view import (
    ATTENTION_NAME,
    check_model,
    find_cached_layers,
    make_error,
    make_view,
)
from TrainingFactory.sampling.flattening import apply_draws, flatten_plan, make_draw_inputs, select_rope
from TrainingFactory.sampling.gpu.graphs import DecodeGraphs, to_device
from TrainingFactory.sampling.logit_check import CHUNK_LENGTH, NUM_STEPS, check_logits
from TrainingFactory.sampling.picking import DrawInputs, pick
from TrainingFactory.sampling.planning import EMPTY, StepPlan
from TrainingFactory.sampling.sizing import round_up, size_cache, size_states
from TrainingFactory.sampling.table import CHUNK, SlotTable
from TrainingFactory.sampling.twins import TwinRows, find_twins

if TYPE_CHECKING:
    from TrainingFactory.models.vision import Vision


class Runner:
    """Runner of the engine's forwards, in inference mode. It owns the cache and the view of the model, a second module
    tree over the same weights."""

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
        self.vocabulary_size: int = embeddings.num_embeddings
        self.device: torch.device = embeddings.weight.device
        self.model_type = model.config.model_type
        self._get_fused_class: Callable[[torch.nn.Module], type[torch.nn.Module] | None] | None = None
        self.states = ModelStates()  # of recurrent layers
        self.refresh()
        self.shapes = self._probe_layer_shapes()
        self.dtype = self.shapes[0].dtype
        memory_bytes = get_free_memory(self.device) if cache_bytes is None else cache_bytes
        memory_bytes = size_states(table, self.states.shapes, memory_bytes)
        size_cache(table, self.shapes, memory_bytes, lazy=cache_bytes is None and self.device.type == "cpu")
        self.max_width = round_up(table.max_length, 64)
        self.cache: PagedCache | None = None
        self._all_positions = torch.arange(max(self.max_width, 64), device=self.device)
        self._zero_bias = torch.zeros((), dtype=self.dtype, device=self.device)
        self._masked_bias = torch.full((), -torch.inf, dtype=self.dtype, device=self.device)
        is_supported = all(shape.key_size == shape.value_size for shape in self.shapes)
        self._is_fused = is_supported and self.device.type == "cpu"  # by the CPU's fused kernel
        self.launches_ahead = False  # steps are launched before the tokens of the previous step are known
        self._prefix_lengths: dict[tuple[int, bytes], int] = {}
        self._latest_tokens = torch.zeros(table.num_slots + 1, dtype=torch.long, device=self.device)
        # Whether `_latest_tokens`, which are by slot too, follow a stop.
        self._has_ended = torch.zeros(table.num_slots + 1, dtype=torch.bool, device=self.device)
        self._graphs = DecodeGraphs(self.device) if self.device.type == "cuda" else None
        self._choose_kernels()
        self._compare_logits()

    def _choose_kernels(self) -> None:
        """Choose the kernels that fit the recorded layer shapes. Subclasses override this."""

    def refresh(self) -> None:
        """Rebuild the view of the model, because the model's adapters or modules may have changed."""
        self.view = make_view(self.model, ATTENTION_NAME, self._get_fused_class)
        self.states.attach(self.view)
        self._weights_moved = True  # the addresses in CUDA graphs may be stale

    @torch.inference_mode()
    def _probe_layer_shapes(self) -> list[LayerShape]:
        """Run two tokens through the model to get the shapes of its layers; raise ValueError if it is unsupported."""
        step, ids = StepContext(), torch.zeros(2, dtype=torch.long, device=self.device)
        self._compute_logits(ids, ids, step, 0)
        cached_layers = find_cached_layers(self.model)
        recorded_layers = {shape.layer for shape in (*step.shapes, *self.states.shapes)}
        if not step.shapes or recorded_layers != cached_layers:
            raise make_error(
                self.model_type,
                f"{len(step.shapes)} of its {len(cached_layers)} layers use the attention interface, and "
                f"{len(self.states.shapes)} are recurrent",
            )
        return step.shapes

    @torch.inference_mode()
    def _compare_logits(self) -> None:
        """Raise ValueError if the logits of chunks and dense rows differ from those with the model's own attention."""
        check_logits(make_view(self.model, "eager"), self._compute_step_logits, self.dtype)

    def _compute_step_logits(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits of sequences through the cache: of a chunk, then of one token per step."""
        windows = list_windows(self.shapes)
        sequence_logits = list[torch.Tensor]()
        for ids in sequences:
            pages = CachePages(1, 64, windows, [64 // PAGE] * len(windows), fixed=True)
            cache, states = PagedCache(pages, self.shapes), StateCache(self.states.shapes, 1)
            for positions in self._all_positions[: len(ids)].split([CHUNK_LENGTH] + NUM_STEPS * [1]):
                part = AttentionPart(slice(0, 1), positions[None], 64, self._make_attention_mask)
                step_parts: Any = {"dense": part, "num_dense": 1} if len(positions) == 1 else {"chunks": part}
                row = StateRows(slice(0, len(positions)), slice(0, 1), 1, is_new=int(positions[0]) == 0)
                self.states.begin(states, [row])
                step = StepContext(cache, positions.expand(len(windows), -1), **step_parts)
                step = self._add_kernel_inputs(step, positions)
                sequence_logits.append(self._compute_logits(ids[positions], positions, step, 0).float())
        return torch.cat(sequence_logits).unflatten(0, sequences.shape)

    def _add_kernel_inputs(self, step: StepContext, positions: torch.Tensor) -> StepContext:
        """Return the step. Subclasses with GPU kernels add the kernels' inputs."""
        return step

    # -- cache

    def get_cache(self) -> PagedCache:
        """Return the cache, with the device's page tables up to date. The first call allocates it."""
        is_new = self.cache is None
        if self.cache is None:
            self._weights_moved = True
            self.cache = PagedCache(self.table.pages, self.shapes)
        self.cache.upload_tables()
        self.states.prepare(self.table.snapshots, allocate=is_new)
        return self.cache

    @torch.inference_mode()
    def copy_pages(self) -> None:
        """Execute the pending page copies of the slot table."""
        self.get_cache().copy_pages()

    def round_width(self, length: int) -> int:
        """Return the number of cached positions that attention reads for sequences of this length."""
        if not self.table.deterministic:
            # few widths on a GPU, because each has a graph
            return min(round_up(length, 128 if self.device.type == "cuda" else 64), self.max_width)
        # The CPU's kernel processes blocks of 512 keys, and fully masked blocks add exact zeros.
        return min(round_up(length, 512), self.max_width) if self._is_fused else self.max_width

    def find_shared_prefix(self, slots: np.ndarray) -> int:
        """Return the length of the slots' common prefix; 0 if attention should read each row separately."""
        if len(slots) < 4 or self.table.deterministic or not self._is_fused:
            return 0
        cache_key = (self.table.num_changes, slots.tobytes())
        if cache_key not in self._prefix_lengths:
            if len(self._prefix_lengths) > 8:
                self._prefix_lengths.clear()
            length = self.table.find_shared_prefix(slots) // 32 * 32
            self._prefix_lengths[cache_key] = length if length >= 64 else 0
        return self._prefix_lengths[cache_key]

    # -- one forward

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> SampledTokens:
        """Run the plan and advance the table's `stored`. The caller appends the new tokens to the table."""
        batch, samples = self._begin_step(plan)
        return apply_draws(self.table, plan, batch, samples)

    def _begin_step(self, plan: StepPlan) -> tuple[FlatBatch, torch.Tensor | None]:
        table = self.table
        stored_lengths, guess_counts = table.stored, plan.guess_counts if plan.guesses is not None else 0
        dense_end = int((stored_lengths[plan.dense] + guess_counts).max()) + 1 if len(plan.dense) else 0
        chunk_end = int((stored_lengths[plan.slots] + plan.counts).max()) if len(plan.slots) else 0
        return self._feed_tokens(plan, self.get_cache(), dense_end, chunk_end)

    def _feed_tokens(
        self, plan: StepPlan, cache: PagedCache, dense_end: int, chunk_end: int
    ) -> tuple[FlatBatch, torch.Tensor | None]:
        prefix = self.find_shared_prefix(plan.dense)
        batch = flatten_plan(self.table, plan, prefix)
        draws = make_draw_inputs(self.table, batch)
        widths = self.round_width(dense_end), self.round_width(chunk_end)
        samples = None
        is_recorded = self._graphs is not None and not len(plan.slots) and not draws.filters
        if is_recorded and not self._shows_images(batch):
            samples = self._replay_graph(plan, cache, batch, draws, widths[0])
        if samples is None:
            samples = self._forward_and_draw(plan, batch, StepContext(cache=cache), draws, widths, prefix)
        return batch, samples

    def _shows_images(self, batch: FlatBatch) -> bool:
        """Return whether the step feeds image tokens. Such a step cannot run as a CUDA graph, because graphs do not
        record the embeddings of images."""
        return self.vision is not None and bool((batch.tokens >= VIRTUAL).any())

    def _fill_in_flight_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replace the ids of in-flight tokens, which the host does not know, by the tokens on the device."""
        return torch.where(tokens < 0, self._latest_tokens[(-1 - tokens).clamp_(min=0)], tokens)

    def _forward_and_draw(
        self, plan: StepPlan, batch: FlatBatch, step: StepContext, draws: DrawInputs[np.ndarray],
        widths: tuple[int, int], prefix_length: int,
    ) -> torch.Tensor | None:  # fmt: skip
        """Run the forward and draw tokens. Return tokens and log-probs [2, M], or None if no draw is used."""
        twin_rows = self._find_twin_rows(plan, batch)
        leader_plan = plan if twin_rows is None else select_leaders(plan, twin_rows)
        if self.states.cache is not None:
            slots = batch.slots[: int(batch.fed_counts.sum())]
            dense_states = [make_dense(slots, self.table.num_slots, self.device)] if len(slots) else []
            self.states.begin(self.states.cache, [*dense_states, *self._make_chunk_rows(plan, len(slots))])
        row_slots, fed_counts = slice(0, plan.rows), batch.fed_counts
        if not plan.feeds_unused:
            row_slots, fed_counts = cover_slots(leader_plan.dense, batch.fed_counts[leader_plan.dense])
        chunk_slots, counts = cover_slots(leader_plan.slots, leader_plan.counts)
        rope = EMPTY if self.table.get_rope is None else select_rope(self.table, batch.slots, batch.positions)
        arrays = make_step_inputs(batch, self._locate_tokens(batch), twin_rows, fed_counts, counts, rope)
        image_inputs: dict[str, Any] = {}
        if self.vision is not None:
            if self.vision.sees_whole_images:
                arrays = arrays._replace(ends=self.vision.compute_image_ends(arrays.tokens, arrays.positions))
            ids, image_inputs = self.vision.make_model_inputs(self.model, arrays.tokens[None])
            arrays = arrays._replace(tokens=ids[0])
        tensors = to_device([*arrays, *draws.tensors], self.device)
        inputs = StepInputs(*tensors[: len(arrays)])
        step.cache_positions = inputs.cache_positions.unflatten(0, (len(self.table.pages.tables), -1))
        step.num_dense = int(fed_counts.sum())
        step.source_tokens = inputs.source_tokens if twin_rows is not None else None
        if plan.rows:
            token_range = slice(0, step.num_dense)
            step.dense = self._make_attention_part(
                row_slots, inputs, token_range, (inputs.dense_pad, inputs.dense_unpad), widths[0]
            )
            step.dense.prefix_length, step.dense.prefix_slot = prefix_length, int(leader_plan.dense[0])
        if len(leader_plan.slots):
            token_range = slice(step.num_dense, None)
            step.chunks = self._make_attention_part(
                chunk_slots, inputs, token_range, (inputs.chunk_pad, inputs.chunk_unpad), widths[1]
            )
            step.chunks.prefix_length = self.find_shared_prefix(leader_plan.slots)
            step.chunks.prefix_slot = int(leader_plan.slots[0])
        ids = inputs.tokens if not self.table.in_flight.any() else self._fill_in_flight_tokens(inputs.tokens)
        positions = inputs.rope.unflatten(0, (3, -1)) if len(rope) else inputs.positions
        logit_tokens = inputs.logit_tokens if len(plan.slots) else 0
        logits = self._compute_logits(ids, positions, step, logit_tokens, image_inputs)
        if not batch.is_used.any():
            return None
        draw_inputs = DrawInputs(*tensors[len(arrays) :])
        logit_rows = inputs.logit_rows if twin_rows is not None else None
        samples = pick(logits, draw_inputs.uniform, draw_inputs.temperature, draw_inputs.filters, logit_rows)
        if self.launches_ahead:
            self._latest_tokens[batch.rows[batch.is_used]] = samples[0, batch.is_used].long()
        return samples

    def _make_chunk_rows(self, plan: StepPlan, num_dense: int) -> list[StateRows]:
        """Return the rows that recurrent layers prefill. They begin after `num_dense` tokens of decoding rows."""
        positions = self.table.stored[plan.slots]
        first_token = int(positions[0]) % CHUNK if self.table.deterministic and len(positions) else num_dense
        return make_chunks(plan.slots, plan.counts, positions, first_token, self.device)

    def _make_graph_inputs(
        self, tokens: np.ndarray, slots: np.ndarray, positions: np.ndarray, num_dense_tokens: int, rows: np.ndarray,
        is_used: np.ndarray, logit_tokens: np.ndarray = EMPTY,
    ) -> GraphInputs[np.ndarray]:  # fmt: skip
        """Return the inputs of a forward that feeds the tokens [N] to `slots` [N] and draws for the slots `rows` [M].
        The first `num_dense_tokens` tokens belong to decoding rows."""
        table = self.table
        cache_positions = table.pages.locate(slots, positions).ravel()
        target_slots = np.where(is_used, rows, table.num_slots)
        rope = EMPTY
        if table.get_rope is not None:
            rope = select_rope(table, slots, positions).T.ravel().astype(np.int64)
        inputs = GraphInputs(
            tokens, positions, cache_positions, logit_tokens, target_slots, rope, EMPTY, EMPTY
        )
        if not self.states.shapes:
            return inputs
        return inputs._replace(state_slots=slots[:num_dense_tokens], stops=table.stops[rows].ravel())

    def _prepare_states(self, inputs: GraphInputs[torch.Tensor], chunks: Sequence[StateRows] = ()) -> None:
        """Prepare the states of the recurrent layers for a forward: those of its decoding rows, then those of its
        chunks. A row whose turn has ended on the device keeps its state, although the host still feeds it a token
        because it does not know the stop token yet."""
        if self.states.cache is None:
            return
        num_rows = len(inputs.state_slots)
        is_in_flight = inputs.tokens[:num_rows] < 0
        has_ended = self._has_ended.index_select(0, inputs.state_slots) & is_in_flight
        self._has_ended.index_copy_(0, inputs.state_slots, has_ended)
        slots = torch.where(has_ended, self.table.num_slots, inputs.state_slots)
        dense_states = [StateRows(slice(0, num_rows), slots, num_rows)] if num_rows else []
        self.states.begin(self.states.cache, [*dense_states, *chunks])

    def _record_ended(self, inputs: GraphInputs[torch.Tensor], drawn_tokens: torch.Tensor) -> None:
        """Record on the device which of the drawn tokens [M] end their turn."""
        if self.states.cache is not None:
            is_stop = (inputs.stops.unflatten(0, (len(drawn_tokens), -1)) == drawn_tokens[:, None]).any(1)
            has_ended = is_stop | self._has_ended.index_select(0, inputs.target_slots)
            self._has_ended.index_copy_(0, inputs.target_slots, has_ended)

    def _select_rotary_input(self, inputs: GraphInputs[torch.Tensor]) -> torch.Tensor:
        return inputs.rope.unflatten(0, (3, -1)) if len(inputs.rope) else inputs.positions

    def _find_twin_rows(self, plan: StepPlan, batch: FlatBatch) -> TwinRows | None:
        rows = np.concatenate((plan.dense, plan.slots))
        if plan.feeds_unused or len(rows) < 2 or self.states.shapes:  # fixed shapes: a row less saves nothing
            return None
        counts = np.concatenate((batch.fed_counts[plan.dense], plan.counts))
        token_hashes = self.table.hash_tokens(batch.tokens, batch.positions)
        return find_twins(self.table.hashes[rows], token_hashes, counts)

    def _compute_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext, logit_tokens: torch.Tensor | int,
        image_inputs: dict[str, Any] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the logits [M, V] of `logit_tokens`, or of all tokens if it is 0. `positions` are [N] or [3, N];
        `image_inputs` are the arguments of the forward for the images among the tokens."""
        output = self.view(
            input_ids=ids[None], position_ids=positions.unsqueeze(-2), use_cache=False, tfactory_step=step,
            logits_to_keep=logit_tokens, **(image_inputs or {}),
        )  # fmt: skip
        return output.logits[0]

    def _replay_graph(
        self, plan: StepPlan, cache: PagedCache, batch: FlatBatch, draws: DrawInputs[np.ndarray], width: int
    ) -> torch.Tensor | None:
        """Run a plan that only decodes, without filters, as a CUDA graph; None if it cannot be recorded."""
        assert self._graphs is not None
        inputs = self._make_graph_inputs(
            batch.tokens, batch.slots, batch.positions, len(batch.tokens), batch.rows, batch.is_used
        )
        num_tables = len(self.table.pages.tables)

        def run_step(tensors: list[torch.Tensor]) -> torch.Tensor:
            inputs = GraphInputs(*tensors[: len(GraphInputs._fields)])
            draws = DrawInputs(*tensors[len(inputs) :])
            self._prepare_states(inputs)
            rows = inputs.positions.unflatten(0, (plan.rows, -1))
            part = AttentionPart(slice(0, plan.rows), rows, width, self._make_attention_mask)
            targets = inputs.cache_positions.unflatten(0, (num_tables, -1))
            context = StepContext(cache, targets, dense=part, num_dense=len(inputs.tokens))
            logits = self._compute_logits(inputs.tokens, self._select_rotary_input(inputs), context, 0)
            return pick(logits, draws.uniform, draws.temperature)

        self._drop_stale_graphs(cache)
        arrays, dry_arrays = (
            [*leg, *draws.tensors] for leg in (inputs, inputs.without_effects(self.table.num_slots))
        )
        key = plan.rows, plan.span, width, *map(len, arrays)
        return self._graphs.run(key, arrays, dry_arrays, run_step)

    def _drop_stale_graphs(self, cache: PagedCache) -> None:
        if self._weights_moved and self._graphs is not None:
            tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
            tensors += self.states.cache.tensors if self.states.cache is not None else []
            self._graphs.drop_stale_graphs(self.model, [*tensors, *cache.tables])
            self._weights_moved = False

    def _locate_tokens(self, batch: FlatBatch) -> np.ndarray:
        return self.table.pages.locate(batch.slots, batch.positions).ravel()

    def _make_attention_part(
        self, slots: slice | np.ndarray, inputs: StepInputs[torch.Tensor], token_range: slice,
        padding: tuple[torch.Tensor, torch.Tensor], width: int,
    ) -> AttentionPart:  # fmt: skip
        rows = slots.stop - slots.start if isinstance(slots, slice) else len(slots)
        pad, unpad = padding if len(padding[0]) else (None, None)

        def fold_rows(tokens: torch.Tensor) -> torch.Tensor:
            return (tokens[token_range] if pad is None else tokens[token_range][pad]).unflatten(0, (rows, -1))

        slot_index = slots if isinstance(slots, slice) else torch.from_numpy(slots).to(self.device)
        mask = self._make_attention_mask
        if len(inputs.ends):
            mask = partial(mask, ends=fold_rows(inputs.ends))
        return AttentionPart(slot_index, fold_rows(inputs.positions), width, mask, pad, unpad)

    def _make_attention_mask(
        self, positions: torch.Tensor, width: int, window: int | None, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the additive attention mask [rows, 1, T, width] of tokens at `positions` [rows, T]. It is causal, or
        with `ends` each token attends up to its entry in `ends`."""
        if window is None and self.vision is not None and self.vision.sees_whole_in_windows_only:
            ends = None
        cached_positions, positions = self._all_positions[:width], positions[:, None, :, None]
        is_masked = cached_positions > (positions if ends is None else ends[:, None, :, None])
        if window is not None:
            is_masked = is_masked | (cached_positions <= positions - window)
        return torch.where(is_masked, self._masked_bias, self._zero_bias)
