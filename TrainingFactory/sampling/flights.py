"""Launch steps on a GPU, through its kernels where these know the model, before the last one's tokens are looked at."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from TrainingFactory.sampling.graphs import to_device
from TrainingFactory.sampling.picking import finite, pick, split_picked, uniforms
from TrainingFactory.sampling.planning import Plan
from TrainingFactory.sampling.runner import Flat, Runner, Sampled
from TrainingFactory.sampling.slots import SlotCache, StepContext, Tiles
from TrainingFactory.sampling.tiles import lay_out

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Flight:
    """Holds a step that runs while the next one is planned: each of its slots gets one token."""

    slots: np.ndarray
    places: np.ndarray
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
        from TrainingFactory.sampling import fused, kernels

        if fused.can_attend(self.shapes):
            self._kernels = kernels
            self._fused_kind = fused.fused_kind if self.kind in fused.MODELS else None
            self.refresh()

    def refresh(self) -> None:
        super().refresh()
        if self._kernels is not None:
            from TrainingFactory.sampling.fused import widen

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
        table = self.table
        flat, picked = self._begin(plan)
        slots, ready = flat.rows[flat.live], None
        if picked is not None and picked.is_cuda:
            host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True)
            picked, ready = host.copy_(picked, non_blocking=True), torch.cuda.Event()
            ready.record()
        flight = Flight(slots, table.known[slots], table.epoch[slots], flat.live, picked, ready)
        table.advance(plan.dense, 1)
        if len(plan.slots):
            table.advance(plan.slots, plan.counts)
        table.expect(slots)
        return flight

    def land(self, flight: Flight) -> Sampled:
        """Wait for the tokens of a step, and return those whose turn still goes on."""
        if flight.ready is not None:
            flight.ready.synchronize()
        tokens, logprobs = split_picked(flight.picked, flight.live)
        same = self.table.epoch[flight.slots] == flight.epochs
        slots, tokens, logprobs = flight.slots[same], tokens[flight.live][same], logprobs[flight.live][same]
        self.table.flying[slots] -= 1
        return Sampled(slots, flight.places[same], tokens, finite(logprobs))

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
        arrays = [flat.tokens, flat.positions, flat.where, flat.keep, into, draws, *limits, *layout.arrays]

        def step(tensors: list[torch.Tensor]) -> torch.Tensor:
            tokens, positions, where, keep, into, draws = tensors[:6]
            heat, rest = tensors[6 : 6 + len(limits)], tensors[6 + len(limits) :]
            context = StepContext(cache, where, tokens=plan.rows * (plan.span or 1), positions=positions)
            context.attend = kernels.attend
            layout.enter(context, plan, rest)
            logits = self._logits(self._known(tokens), positions, context, keep if len(plan.slots) else 0)
            if len(heat) > 1:
                picked = pick(logits, draws, heat[0], heat[1:])
            else:
                picked = kernels.choose(logits, draws, heat[0] if heat else None)
            self._latest.index_copy_(0, into, picked[0].long())
            return picked

        picked = None
        if self._graphs is not None and len(limits) < 2 and layout.recorded:
            self._check_graphs(cache)
            picked = self._graphs.run((plan.rows, plan.span, len(limits), *layout.key), arrays, step)
        if picked is None:
            picked = step(to_device(arrays, self.device))
        return flat, picked
