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
from TrainingFactory.sampling.picking import Data, DrawInputs, pick, require_finite, split_picked, uniforms
from TrainingFactory.sampling.planning import StepPlan
from TrainingFactory.sampling.runner import Runner
from TrainingFactory.sampling.tiles import TileLayout, plan_tiles

log = logging.getLogger(__name__)


@dataclass(slots=True)
class InFlightStep:
    """A step that runs while the next one is planned. It samples a token for each slot, and a second one for slots
    whose turn may continue."""

    slots: np.ndarray  # slots of the first tokens, then those of the second
    places: np.ndarray  # positions of the tokens in their slot's sequence
    first: int  # number of first tokens
    epochs: np.ndarray  # the token of a slot whose epoch has changed since is dropped
    live: np.ndarray  # [M] the rows of logits whose tokens are used
    picked: torch.Tensor | None  # [2, M], being copied to the host
    ready: torch.cuda.Event | None  # recorded after that copy


# The first leg of a launch samples a token per slot, the second one feeds these tokens.
Leg = tuple[GraphInputs[Data], DrawInputs[Data]]


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
            kind = self.model.config.get_text_config().model_type
            self._fused_kind = fused.REPLACEMENTS.get(kind)
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
            self._kernels = self._fused_kind = None
            self.refresh()
            super()._compare_logits()

    @property
    def tiled(self) -> bool:
        return self._kernels is not None

    def _tile_comparison(self, step: StepContext, positions: torch.Tensor) -> StepContext:
        if self._kernels is not None:
            step.attend, step.positions, first = self._kernels.attend, positions, self._span[:1]
            step.rows = Tiles(1, 1) if step.tokens else None
            step.pieces = (
                None if step.tokens else Tiles(len(positions), 1, positions, first, first + len(positions))
            )
        return step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlightStep:
        """Start the forward of a plan without guesses, and advance the table as if the sampled tokens were already
        known. `land` returns the tokens."""
        table, plan.twice = self.table, True
        batch, picked = self._begin(plan)
        slots, offsets = batch.rows[batch.live], batch.offsets[batch.live]
        copied_event = None
        if picked is not None and picked.is_cuda:
            host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True)
            picked, copied_event = host.copy_(picked, non_blocking=True), torch.cuda.Event()
            copied_event.record()
        first = int((offsets == 0).sum())
        flight = InFlightStep(
            slots, table.lengths[slots] + offsets, first, table.epoch[slots], batch.live, picked, copied_event
        )
        table.advance(plan.dense, 1)
        if len(plan.slots):
            table.advance(plan.slots, plan.counts)
        table.expect(slots[:first])
        table.advance(slots[first:], 1)
        table.expect(slots[first:])
        return flight

    def land(self, flight: InFlightStep) -> SampledTokens:
        """Wait for the sampled tokens of a launched step. Return the tokens of turns that have not ended meanwhile."""
        if flight.ready is not None:
            flight.ready.synchronize()
        table, first = self.table, flight.first
        tokens, logprobs = (array[flight.live] for array in split_picked(flight.picked, flight.live))
        valid = table.epoch[flight.slots] == flight.epochs
        if first < len(tokens):  # drop second tokens after a stop
            is_ended = np.zeros(table.slots, bool)
            is_ended[flight.slots[:first]] = table.stopped(flight.slots[:first], tokens[:first])
            valid[first:] &= ~is_ended[flight.slots[first:]]
        slots = flight.slots[valid]
        table.flying -= np.bincount(slots, minlength=table.slots)
        return SampledTokens(slots, flight.places[valid], tokens[valid], require_finite(logprobs[valid]))

    def _feed_tokens(
        self, plan: StepPlan, cache: PagedCache, dense_end: int, chunk_end: int
    ) -> tuple[FlatBatch, torch.Tensor | None]:
        if self._kernels is None:
            return super()._feed_tokens(plan, cache, dense_end, chunk_end)
        kernels, table, shape = self._kernels, self.table, self.shapes[0]
        layout = plan_tiles(plan, table, shape.queries // shape.heads)
        batch = flatten_plan(table, plan, 0, layout)
        draws, images = make_draw_inputs(table, batch), dict[str, Any]()
        dense = plan.rows * (plan.span or 1)
        first = self._make_graph_inputs(
            batch.tokens, batch.slots, batch.positions, dense, batch.rows, batch.live, batch.keep
        )
        recorded = layout.recorded and not draws.filters
        if self.vision is not None and self._shows_images(batch):
            ids, images = self.vision.model_inputs(self.model, batch.tokens[None])
            first, recorded = first._replace(tokens=ids[0]), False
        legs = [(first, draws)]
        if recorded and plan.twice and plan.rows:
            legs.append(self._second_leg(plan, batch, scaled=draws.temperature is not None))
        chunks = self._chunk_rows(plan, dense) if self.states.shapes else []

        def step(tensors: list[torch.Tensor]) -> torch.Tensor:
            remaining, results = iter(tensors), []
            leg_tensors = [_next_leg(remaining, leg) for leg in legs]
            tiles = list(remaining)
            for number, (inputs, draws) in enumerate(leg_tensors):
                targets = inputs.cache_positions.unflatten(0, (len(table.pages.tables), -1))
                context = StepContext(cache, targets, tokens=dense)
                context.attend, context.positions = kernels.attend, inputs.positions
                layout.enter(context, plan, tiles)
                has_chunks = len(plan.slots) and not number
                context.pieces = context.pieces if has_chunks else None
                keep, ids = inputs.keep if has_chunks else 0, self._fill_in_flight_tokens(inputs.tokens)
                self._enter_states(inputs, chunks if has_chunks else ())
                logits = self._compute_logits(ids, self._select_rotary_input(inputs), context, keep, images)
                if draws.filters:
                    picked = pick(logits, draws.uniform, draws.temperature, draws.filters)
                else:
                    picked = kernels.sample_tokens(logits, draws.uniform, draws.temperature)
                drawn = picked[0].long()
                self._latest.index_copy_(0, inputs.target_slots, drawn)
                self._leave_states(inputs, drawn)
                results.append(picked)
            return torch.cat(results, 1) if len(results) > 1 else results[0]

        picked = None
        if self._graphs is not None and recorded:
            self._check_graphs(cache)
            key = plan.rows, plan.span, len(draws.present) - 1, len(legs), *layout.key, len(first.stops)
            dry = [(inputs.dry(table.slots), draws) for inputs, draws in legs]
            picked = self._graphs.run(key, _arrays(legs, layout), _arrays(dry, layout), step)
        if picked is None:
            picked = step(to_device(_arrays(legs, layout), self.device))
        return batch, picked

    def _second_leg(self, plan: StepPlan, batch: FlatBatch, scaled: bool) -> Leg[np.ndarray]:
        """Return the inputs of a launch's second forward, and add its rows of logits to `batch`. It feeds the tokens
        that the first forward samples, in rows whose turn may continue. A launch runs two forwards because it takes the
        host about as long as one token takes the GPU."""
        table, rows = self.table, np.arange(plan.rows)
        slots = batch.rows[batch.live]
        slots = slots[(slots < plan.rows) & (table.lengths[slots] + 1 < table.limit[slots])]
        live, places = np.zeros(plan.rows, bool), table.lengths[slots]
        live[slots] = True
        tokens, positions = np.where(live, -1 - rows, 0), batch.positions[: plan.rows].copy()
        positions[slots] = places
        inputs = self._make_graph_inputs(
            tokens, np.where(live, rows, table.slots), positions, plan.rows, rows, live
        )
        batch.rows, batch.live = np.concatenate((batch.rows, rows)), np.concatenate((batch.live, live))
        batch.offsets = np.concatenate((batch.offsets, np.ones(plan.rows, np.int64)))
        uniform = uniforms(table.seed[: plan.rows], table.lengths[: plan.rows] + 1)
        draws = DrawInputs(uniform, table.temperature[: plan.rows] if scaled else None)
        return inputs, draws


def _arrays(legs: list[Leg[np.ndarray]], layout: TileLayout) -> list[np.ndarray]:
    return [*(array for inputs, draws in legs for array in (*inputs, *draws.present)), *layout.arrays]


def _next_leg(tensors: Iterator[torch.Tensor], arrays: Leg[np.ndarray]) -> Leg[torch.Tensor]:
    """Take the tensors of one forward from the iterator, in the order of its `arrays`."""
    inputs, draws = arrays
    return GraphInputs(*islice(tensors, len(inputs))), DrawInputs(*islice(tensors, len(draws.present)))
