"""Asynchronous steps on a GPU: each step is launched before the tokens of the previous one are fetched."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from TrainingFactory.sampling.batches import FlatBatch, GraphInputs, SampledTokens
from TrainingFactory.sampling.cache.attention import StepContext, Tiles
from TrainingFactory.sampling.cache.store import PagedCache
from TrainingFactory.sampling.flattening import flatten_plan, make_draw_inputs
from TrainingFactory.sampling.gpu.graphs import to_device
from TrainingFactory.sampling.picking import Data, DrawInputs, pick, require_finite, uniforms, unpack_draws
from TrainingFactory.sampling.planning import StepPlan
from TrainingFactory.sampling.runner import Runner
from TrainingFactory.sampling.tiles import TileLayout, plan_tiles

log = logging.getLogger(__name__)


@dataclass(slots=True)
class InFlightStep:
    """A step that runs while the next one is planned. It samples a token for each slot, and a second one for slots
    whose turn may continue."""

    slots: np.ndarray  # slots of the first tokens, then those of the second
    positions: np.ndarray  # positions of the tokens in their slot's sequence
    num_first: int  # number of first tokens
    epochs: np.ndarray  # the token of a slot whose epoch has changed since is dropped
    is_used: np.ndarray  # [M] the rows of logits whose tokens are used
    samples: torch.Tensor | None  # [2, M], being copied to the host
    copy_event: torch.cuda.Event | None  # recorded after that copy


# The first leg of a launch samples a token per slot, the second one feeds these tokens.
Pass = tuple[GraphInputs[Data], DrawInputs[Data]]


class AsyncRunner(Runner):
    """A `Runner` whose `launch` returns before the sampled tokens reach the host. It uses the engine's own GPU kernels
    if `tiled` is True."""

    _kernels: Any = None

    def _choose_kernels(self) -> None:
        # Triton is part of torch for CUDA. Deterministic mode is for CPUs only. The kernels' attention is causal.
        is_causal = self.vision is None or not self.vision.sees_whole_images
        can_run = self._graphs is not None and is_causal and not self.table.deterministic
        if can_run and importlib.util.find_spec("triton"):
            self.use_kernels()

    def use_kernels(self) -> None:
        from TrainingFactory.sampling.gpu import fused, kernels

        if fused.can_attend(self.shapes):
            self._kernels = kernels
            model_type = self.model.config.get_text_config().model_type
            self._get_fused_class = fused.FUSED_CLASS_GETTERS.get(model_type)
            self.refresh()

    def refresh(self) -> None:
        super().refresh()
        self.states.kernels = None
        if self._kernels is not None:
            from TrainingFactory.sampling.gpu import delta
            from TrainingFactory.sampling.gpu.fused import use_float32_logits

            self.states.kernels = delta

            use_float32_logits(self.view.get_output_embeddings())

    def _compare_logits(self) -> None:
        try:
            super()._compare_logits()
        except Exception as error:  # a device or a model that the kernels do not support
            if self._kernels is None:
                raise
            log.warning("Sampling without the fused GPU kernels, which is slower: %s", error)
            self._kernels = self._get_fused_class = None
            self.refresh()
            super()._compare_logits()

    @property
    def tiled(self) -> bool:
        return self._kernels is not None

    def _add_kernel_inputs(self, step: StepContext, positions: torch.Tensor) -> StepContext:
        if self._kernels is not None:
            step.attend, step.positions, zero = self._kernels.attend, positions, self._all_positions[:1]
            step.row_tiles = Tiles(1, 1) if step.num_dense else None
            step.chunk_tiles = (
                None if step.num_dense else Tiles(len(positions), 1, positions, zero, zero + len(positions))
            )
        return step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlightStep:
        """Start the forward of a plan without guesses, and advance the table as if the sampled tokens were already
        known. `fetch_tokens` returns the tokens."""
        table, plan.may_run_twice = self.table, True
        batch, samples = self._begin_step(plan)
        slots, offsets = batch.rows[batch.is_used], batch.offsets[batch.is_used]
        copy_event = None
        if samples is not None and samples.is_cuda:
            host_tensor = torch.empty(samples.shape, dtype=samples.dtype, pin_memory=True)
            samples, copy_event = host_tensor.copy_(samples, non_blocking=True), torch.cuda.Event()
            copy_event.record()
        num_first, positions = int((offsets == 0).sum()), table.lengths[slots] + offsets
        flight = InFlightStep(
            slots, positions, num_first, table.epoch[slots], batch.is_used, samples, copy_event
        )
        table.advance_stored(plan.dense, 1)
        if len(plan.slots):
            table.advance_stored(plan.slots, plan.counts)
        table.append_in_flight(slots[:num_first])
        table.advance_stored(slots[num_first:], 1)
        table.append_in_flight(slots[num_first:])
        return flight

    def fetch_tokens(self, flight: InFlightStep) -> SampledTokens:
        """Wait for the sampled tokens of a launched step. Return the tokens of turns that are still running."""
        if flight.copy_event is not None:
            flight.copy_event.synchronize()
        table, num_first = self.table, flight.num_first
        tokens, logprobs = (array[flight.is_used] for array in unpack_draws(flight.samples, flight.is_used))
        is_current = table.epoch[flight.slots] == flight.epochs
        if num_first < len(tokens):  # drop second tokens after a stop
            is_ended = np.zeros(table.num_slots, bool)
            is_ended[flight.slots[:num_first]] = table.are_stops(flight.slots[:num_first], tokens[:num_first])
            is_current[num_first:] &= ~is_ended[flight.slots[num_first:]]
        slots = flight.slots[is_current]
        table.in_flight -= np.bincount(slots, minlength=table.num_slots)
        logprobs = require_finite(logprobs[is_current])
        return SampledTokens(slots, flight.positions[is_current], tokens[is_current], logprobs)

    def _feed_tokens(
        self, plan: StepPlan, cache: PagedCache, dense_end: int, chunk_end: int
    ) -> tuple[FlatBatch, torch.Tensor | None]:
        if self._kernels is None:
            return super()._feed_tokens(plan, cache, dense_end, chunk_end)
        kernels, table, shape = self._kernels, self.table, self.shapes[0]
        layout = plan_tiles(plan, table, shape.num_queries // shape.num_key_heads)
        batch = flatten_plan(table, plan, 0, layout)
        draws, images = make_draw_inputs(table, batch), dict[str, Any]()
        dense = plan.rows * (plan.span or 1)
        first_inputs = self._make_graph_inputs(
            batch.tokens, batch.slots, batch.positions, dense, batch.rows, batch.is_used, batch.logit_tokens
        )
        is_recorded = layout.is_recorded and not draws.filters
        if self.vision is not None and self._shows_images(batch):
            ids, images = self.vision.make_model_inputs(self.model, batch.tokens[None])
            first_inputs, is_recorded = first_inputs._replace(tokens=ids[0]), False
        legs = [(first_inputs, draws)]
        if is_recorded and plan.may_run_twice and plan.rows:
            legs.append(self._make_second_forward(plan, batch, is_scaled=draws.temperature is not None))
        chunks = self._make_chunk_rows(plan, dense) if self.states.shapes else []

        def run_step(tensors: list[torch.Tensor]) -> torch.Tensor:
            tensor_iterator, forward_samples = iter(tensors), []
            forward_tensors = [_take_forward(tensor_iterator, forward) for forward in legs]
            tiles = list(tensor_iterator)
            for forward_index, (inputs, draws) in enumerate(forward_tensors):
                cache_positions = inputs.cache_positions.unflatten(0, (len(table.pages.tables), -1))
                context = StepContext(cache, cache_positions, num_dense=dense)
                context.attend, context.positions = kernels.attend, inputs.positions
                layout.assign_tensors(context, plan, tiles)
                has_chunks = len(plan.slots) and not forward_index
                context.chunk_tiles = context.chunk_tiles if has_chunks else None
                ids = self._fill_in_flight_tokens(inputs.tokens)
                keep = inputs.logit_tokens if has_chunks else 0
                self._prepare_states(inputs, chunks if has_chunks else ())
                logits = self._compute_logits(ids, self._select_rotary_input(inputs), context, keep, images)
                if draws.filters:
                    samples = pick(logits, draws.uniform, draws.temperature, draws.filters)
                else:
                    samples = kernels.sample_tokens(logits, draws.uniform, draws.temperature)
                drawn_tokens = samples[0].long()
                self._latest_tokens.index_copy_(0, inputs.target_slots, drawn_tokens)
                self._record_ended(inputs, drawn_tokens)
                forward_samples.append(samples)
            return torch.cat(forward_samples, 1) if len(forward_samples) > 1 else forward_samples[0]

        samples = None
        if self._graphs is not None and is_recorded:
            self._drop_stale_graphs(cache)
            key_sizes = len(draws.tensors) - 1, len(legs), len(first_inputs.stops)
            key = plan.rows, plan.span, *key_sizes, *layout.graph_key
            dry_legs = [(inputs.without_effects(table.num_slots), draws) for inputs, draws in legs]
            samples = self._graphs.run(key, _arrays_of(legs, layout), _arrays_of(dry_legs, layout), run_step)
        if samples is None:
            samples = run_step(to_device(_arrays_of(legs, layout), self.device))
        return batch, samples

    def _make_second_forward(self, plan: StepPlan, batch: FlatBatch, is_scaled: bool) -> Pass[np.ndarray]:
        """Return the inputs of a launch's second forward, and add its rows of logits to `batch`. It feeds the tokens
        that the first forward samples, in rows whose turn may continue. A launch runs two forwards because it takes the
        host about as long as one token takes the GPU."""
        table, rows = self.table, np.arange(plan.rows)
        slots = batch.rows[batch.is_used]
        slots = slots[(slots < plan.rows) & (table.lengths[slots] + 1 < table.limit[slots])]
        is_used, next_positions = np.zeros(plan.rows, bool), table.lengths[slots]
        is_used[slots] = True
        tokens, positions = np.where(is_used, -1 - rows, 0), batch.positions[: plan.rows].copy()
        positions[slots] = next_positions
        inputs = self._make_graph_inputs(
            tokens, np.where(is_used, rows, table.num_slots), positions, plan.rows, rows, is_used
        )
        batch.rows = np.concatenate((batch.rows, rows))
        batch.is_used = np.concatenate((batch.is_used, is_used))
        batch.offsets = np.concatenate((batch.offsets, np.ones(plan.rows, np.int64)))
        uniform = uniforms(table.seed[: plan.rows], table.lengths[: plan.rows] + 1)
        draws = DrawInputs(uniform, table.temperature[: plan.rows] if is_scaled else None)
        return inputs, draws


def _arrays_of(legs: list[Pass[np.ndarray]], layout: TileLayout) -> list[np.ndarray]:
    return [*(array for inputs, draws in legs for array in (*inputs, *draws.tensors)), *layout.arrays]


def _take_forward(tensors: Iterator[torch.Tensor], arrays: Pass[np.ndarray]) -> Pass[torch.Tensor]:
    """Take the tensors of one forward from the iterator, in the order of its `arrays`."""
    inputs, draws = arrays
    return GraphInputs(*islice(tensors, len(inputs))), DrawInputs(*islice(tensors, len(draws.tensors)))
