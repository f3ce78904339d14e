"""Launch steps on a GPU, through its kernels where these know the model, before the last one's tokens are looked at."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from TrainingFactory.sampling.cache.slots import SlotCache, StepContext, Tiles
from TrainingFactory.sampling.gpu.graphs import to_device
from TrainingFactory.sampling.picking import finite, pick, split_picked, uniforms
from TrainingFactory.sampling.planning import NONE, Plan
from TrainingFactory.sampling.runner import Flat, Runner, Sampled
from TrainingFactory.sampling.tiles import lay_out

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """Holds a step that runs while the next one is planned: a token for each of its slots, and a second for those that
    may go on."""

    slots: np.ndarray  # those of the first tokens, then those of the second
    places: np.ndarray
    first: int  # how many are first tokens
    epochs: np.ndarray  # a slot whose epoch has changed meanwhile has no use for its token
    live: np.ndarray  # [M] whose logits they are drawn from
    picked: torch.Tensor | None  # [2, M], on its way to the host
    ready: torch.cuda.Event | None


class FlightRunner(Runner):
    """Runs steps with the GPU's kernels if `tiled`; as `Runner` does otherwise."""

    _kernels: Any = None

    def _prepare(self) -> None:
        # Triton comes with torch for CUDA; deterministic mode holds on a CPU only.
        if self._graphs is not None and not self.table.deterministic and importlib.util.find_spec("triton"):
            self.use_kernels()

    def use_kernels(self) -> None:
        from TrainingFactory.sampling.gpu import fused, kernels

        if fused.can_attend(self.shapes):
            self._kernels = kernels
            self._fused_kind = fused.fused_kind if self.kind in fused.MODELS else None
            self.refresh()

    def refresh(self) -> None:
        super().refresh()
        if self._kernels is not None:
            from TrainingFactory.sampling.gpu.fused import widen

            widen(self.view.get_output_embeddings())

    def _compare(self) -> None:
        try:
            super()._compare()
        except Exception as error:  # a device or a model that the kernels do not know
            if self._kernels is None:
                raise
            log.warning("sampling without the GPU's own kernels: %s", error)
            self._kernels = self._fused_kind = None
            self.refresh()
            super()._compare()

    @property
    def tiled(self) -> bool:
        return self._kernels is not None

    def _tile(self, step: StepContext, at: torch.Tensor) -> StepContext:
        if self._kernels is not None:
            step.attend, step.positions, first = self._kernels.attend, at, self._span[:1]
            step.rows = Tiles(1, 1) if step.tokens else None
            step.pieces = None if step.tokens else Tiles(len(at), 1, at, first, first + len(at))
        return step

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Begin a plan without guesses, and move the table on as if its tokens were known; `land` returns them."""
        table, plan.twice = self.table, True
        flat, picked = self._begin(plan)
        slots, offsets, ready = flat.rows[flat.live], flat.offsets[flat.live], None
        if picked is not None and picked.is_cuda:
            host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True)
            picked, ready = host.copy_(picked, non_blocking=True), torch.cuda.Event()
            ready.record()
        first = int((offsets == 0).sum())
        flight = Flight(
            slots, table.known[slots] + offsets, first, table.epoch[slots], flat.live, picked, ready
        )
        table.advance(plan.dense, 1)
        if len(plan.slots):
            table.advance(plan.slots, plan.counts)
        table.expect(slots[:first])
        table.advance(slots[first:], 1)
        table.expect(slots[first:])
        return flight

    def land(self, flight: Flight) -> Sampled:
        """Wait for the tokens of a step, and return those whose turn still goes on."""
        if flight.ready is not None:
            flight.ready.synchronize()
        table, first = self.table, flight.first
        tokens, logprobs = (array[flight.live] for array in split_picked(flight.picked, flight.live))
        good = table.epoch[flight.slots] == flight.epochs
        if first < len(tokens):  # nothing follows a stop
            ended = np.zeros(table.slots, bool)
            ended[flight.slots[:first]] = table.stopped(flight.slots[:first], tokens[:first])
            good[first:] &= ~ended[flight.slots[first:]]
        slots = flight.slots[good]
        table.flying -= np.bincount(slots, minlength=table.slots)
        return Sampled(slots, flight.places[good], tokens[good], finite(logprobs[good]))

    def _feed(
        self, plan: Plan, cache: SlotCache, dense_end: int, chunk_end: int
    ) -> tuple[Flat, torch.Tensor | None]:
        if self._kernels is None:
            return super()._feed(plan, cache, dense_end, chunk_end)
        kernels, table, shape = self._kernels, self.table, self.shapes[0]
        layout = lay_out(plan, table, shape.queries // shape.heads)
        flat = self._flat(plan, cache, 0, layout)
        draws = uniforms(table.seed[flat.rows], table.known[flat.rows] + flat.offsets)
        into = np.where(flat.live, flat.rows, table.slots)
        limits = self._limits(flat.rows[flat.live], flat.rows)
        legs = [[flat.tokens, flat.positions, flat.where, flat.keep, into, draws, *limits]]
        recorded = layout.recorded and len(limits) < 2
        if recorded and plan.twice and plan.rows:
            legs.append(self._second(plan, flat, cache))
            legs[1] += [table.temperature[: plan.rows]] if limits else []
        arrays = [*chain(*legs), *layout.arrays]

        def step(tensors: list[torch.Tensor]) -> torch.Tensor:
            size, rest, found = len(legs[0]), tensors[len(legs) * len(legs[0]) :], []
            for number in range(len(legs)):
                tokens, positions, where, keep, into, draws, *heat = tensors[number * size :][:size]
                context = StepContext(cache, where, tokens=plan.rows * (plan.span or 1), positions=positions)
                context.attend = kernels.attend
                layout.enter(context, plan, rest)
                chunks = len(plan.slots) and not number
                context.pieces = context.pieces if chunks else None
                logits = self._logits(self._known(tokens), positions, context, keep if chunks else 0)
                if len(heat) > 1:
                    picked = pick(logits, draws, heat[0], heat[1:])
                else:
                    picked = kernels.choose(logits, draws, heat[0] if heat else None)
                self._latest.index_copy_(0, into, picked[0].long())
                found.append(picked)
            return torch.cat(found, 1) if len(found) > 1 else found[0]

        picked = None
        if self._graphs is not None and recorded:
            self._check_graphs(cache)
            key = plan.rows, plan.span, len(limits), len(legs), *layout.key
            picked = self._graphs.run(key, arrays, step)
        if picked is None:
            picked = step(to_device(arrays, self.device))
        return flat, picked

    def _second(self, plan: Plan, flat: Flat, cache: SlotCache) -> list[np.ndarray]:
        """Let rows that sample a token, and may go on after it, feed it in the same launch, for what follows it: a
        launch costs the host as much as the GPU needs for a token. Enter what they sample into `flat`."""
        table, rows = self.table, np.arange(plan.rows)
        slots = flat.rows[flat.live]
        slots = slots[(slots < plan.rows) & (table.known[slots] + 1 < table.limit[slots])]
        live, places = np.zeros(plan.rows, bool), table.known[slots]
        live[slots] = True
        tokens, positions = np.where(live, -1 - rows, 0), flat.positions[: plan.rows].copy()
        positions[slots] = places
        where = np.full(plan.rows, cache.slots * cache.capacity)
        where[slots] = slots * cache.capacity + places
        flat.rows, flat.live = np.concatenate((flat.rows, rows)), np.concatenate((flat.live, live))
        flat.offsets = np.concatenate((flat.offsets, np.ones(plan.rows, np.int64)))
        draws = uniforms(table.seed[: plan.rows], table.known[: plan.rows] + 1)
        return [tokens, positions, where, NONE, np.where(live, rows, table.slots), draws]
