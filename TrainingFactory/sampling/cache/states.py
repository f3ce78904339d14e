"""States of recurrent layers, and the layers that read and write them: one call per group of rows of equal length."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from TrainingFactory.models.recurrent import RowStates, get_cache_argument, is_recurrent
from TrainingFactory.sampling.cache.snapshots import EMPTY_STATE, Snapshots

UNLIMITED_TIME_STEP = (0.0, float("inf"))


class StateShape(NamedTuple):
    """Shapes of a recurrent layer's states for one row, which the engine's probe run records."""

    layer: int
    states: tuple[torch.Tensor | None, torch.Tensor | None]  # empty tensors [0, ...]

    @property
    def row_bytes(self) -> int:
        sizes = (int(np.prod(state.shape[1:])) * state.itemsize for state in self.states if state is not None)
        return sum(sizes)


class StateCache:
    """The recurrent layers' states: tensors whose rows `Snapshots` assigns to slots and snapshots."""

    def __init__(self, shapes: Sequence[StateShape], rows: int) -> None:
        self.layers: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        for layer, (conv_state, recurrent_state) in shapes:
            self.layers[layer] = _make_zeros(conv_state, rows), _make_zeros(recurrent_state, rows)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [state for layer in self.layers.values() for state in layer if state is not None]

    def copy(self, snapshots: Snapshots) -> None:
        """Execute the pending copies of `snapshots` in every layer."""
        copies, snapshots.row_copies = snapshots.row_copies, []
        if not copies:
            return
        device = self.tensors[0].device
        for batch in batch_independent_copies(copies):
            empty = torch.tensor([target for source, target in batch if source == EMPTY_STATE], device=device)
            row_pairs = [pair for pair in batch if pair[0] != EMPTY_STATE]
            sources, targets = torch.tensor(row_pairs, dtype=torch.long, device=device).view(-1, 2).unbind(1)
            for states in self.tensors:
                if row_pairs:
                    states.index_copy_(0, targets, states.index_select(0, sources))
                if len(empty):
                    states.index_fill_(0, empty, 0)


def batch_independent_copies(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Split an ordered list of copies (source, target) into batches of independent copies: in a batch, no row is the
    target of two copies, and no copy reads a row that an earlier one writes."""
    batches: list[list[tuple[int, int]]] = [[]]
    target_rows = set[int]()
    for source, target in copies:
        if source in target_rows or target in target_rows:
            batches.append([])
            target_rows.clear()
        batches[-1].append((source, target))
        target_rows.add(target)
    return batches


def _make_zeros(tensor: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return None if tensor is None else tensor.new_zeros(rows, *tensor.shape[1:])


class StateRows(NamedTuple):
    """P rows of T tokens that a recurrent layer processes in one call."""

    tokens: slice | torch.Tensor  # flat tokens, row by row
    slots: slice | torch.Tensor  # [P] slots whose states the rows continue; padding rows have the unused row
    num_rows: int  # P
    is_new: bool = False  # the rows begin with the first token of their sequence


@dataclass(slots=True)
class StateStep:
    """Inputs of the recurrent layers in one forward."""

    cache: StateCache | None = None  # None: the probe
    rows: list[StateRows] = field(default_factory=list)
    shapes: list[StateShape] = field(default_factory=list)  # filled by the probe


class ModelStates:
    """The states of the recurrent layers of the engine's model. The layers read the current `StateStep` from this
    object, because not every model passes keyword arguments to them. If the model has no recurrent layers, `shapes` is
    empty and no method has an effect."""

    def __init__(self) -> None:
        self.step = StateStep()  # of the probe
        self.shapes: list[StateShape] = self.step.shapes
        self.cache: StateCache | None = None
        self.kernels: Any = None  # the module `gpu.delta`, on a device that runs it

    def prepare(self, snapshots: Snapshots | None, *, allocate: bool) -> None:
        """Execute the pending copies of `snapshots`. `allocate`: allocate a new cache first."""
        if snapshots is None:
            return
        if self.cache is None or allocate:
            self.cache = StateCache(self.shapes, snapshots.num_rows)
        self.cache.copy(snapshots)

    def begin(self, cache: StateCache | None, rows: list[StateRows]) -> None:
        self.step = StateStep(cache, rows)

    def attach(self, view: nn.Module) -> None:
        for module in list(view.modules()):
            if isinstance(module, RecurrentLayer):
                module.__dict__["tfactory_states"] = self
                if tuple(getattr(module, "time_step_limit", UNLIMITED_TIME_STEP)) != UNLIMITED_TIME_STEP:
                    module._modules["in_proj"] = LimitedSteps(module)


class LimitedSteps(nn.Module):
    """The input projection of a Mamba-2 layer, with its limits of the time step: transformers applies the limits if a
    call has several tokens, and not if it has one. Without this class, the engine would therefore compute other
    log-probs for a sampled token than the learner."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        # A list, because the layer is not a part of this module.
        self.layer, self.project = [layer], layer.in_proj
        limits = torch.tensor(layer.time_step_limit, dtype=torch.float64)
        self.min_input, self.max_input = torch.expm1(limits).log().tolist()  # before softplus

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output, bias = self.project(states), self.layer[0].dt_bias.float()
        time_steps = output[..., -len(bias) :]
        limited_steps = torch.clamp(time_steps.float() + bias, self.min_input, self.max_input) - bias
        return torch.cat((output[..., : -len(bias)], limited_steps.to(output.dtype)), -1)


class RecurrentLayer:
    """Mixin for a recurrent layer in the engine's view of the model. It reads and writes the layer's states in the
    engine's cache."""

    tfactory_states: ModelStates
    layer_idx: int

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer's output for the N tokens of a forward [1, N, D]."""
        step = self.tfactory_states.step
        kwargs["attention_mask"] = None
        if step.cache is None:
            states = RowStates(self.layer_idx)
            result = self._call_layer(hidden_states, states, args, kwargs)
            conv_state, recurrent_state = (None if state is None else state[:0] for state in states.tensors)
            step.shapes.append(StateShape(self.layer_idx, (conv_state, recurrent_state)))
            return result
        outputs: list[torch.Tensor] = []
        result: Any = None
        for rows in step.rows:
            inputs = hidden_states[0, rows.tokens].unflatten(0, (rows.num_rows, -1))
            result = self._run_rows(inputs, rows, step.cache.layers[self.layer_idx], args, kwargs)
            outputs.append((result[0] if isinstance(result, tuple) else result).flatten(0, 1))
        if len(outputs) == 1 and len(outputs[0]) == hidden_states.shape[1]:
            flat_output = outputs[0][None]
        else:
            flat_output = outputs[0].new_zeros(1, hidden_states.shape[1], outputs[0].shape[1])
            for rows, output in zip(step.rows, outputs, strict=True):
                flat_output[0, rows.tokens] = output
        return (flat_output, *result[1:]) if isinstance(result, tuple) else flat_output

    def _run_rows(
        self, inputs: torch.Tensor, rows: StateRows, cached: Sequence[torch.Tensor | None], args: Any, kwargs: Any
    ) -> Any:  # fmt: skip
        """Compute rows [P, T, D] from their cached states, and store the new states."""
        kernels = self.tfactory_states.kernels
        if (
            kernels is not None
            and inputs.shape[1] == 1
            and not rows.is_new
            and kernels.can_decode(self, *cached)
        ):
            return kernels.decode(self, inputs, rows.slots, *cached)
        starts = [None if state is None or rows.is_new else _read_rows(state, rows.slots) for state in cached]
        states = RowStates(self.layer_idx, *starts)
        result = self._call_layer(inputs, states, args, kwargs)
        for cache, old_state, new in zip(cached, starts, states.tensors, strict=True):
            if cache is None or new is None or (new is old_state and isinstance(rows.slots, slice)):
                continue  # the layer has updated the cache in place
            if isinstance(rows.slots, slice):
                cache[rows.slots] = new.to(cache.dtype)
            else:
                cache.index_copy_(0, rows.slots, new.to(cache.dtype))
        return result

    def _call_layer(self, inputs: torch.Tensor, states: RowStates, args: Any, kwargs: dict[str, Any]) -> Any:
        base: Any = super()
        return base.forward(inputs, *args, **{**kwargs, get_cache_argument(type(self).__mro__[2]): states})


def _read_rows(states: torch.Tensor, slots: slice | torch.Tensor) -> torch.Tensor:
    """Return the states of the slots: a view if `slots` is a slice, otherwise a copy. A layer may change the result in
    place."""
    return states[slots] if isinstance(slots, slice) else states.index_select(0, slots)


@functools.cache
def _with_states(layer_class: type[nn.Module]) -> type[nn.Module]:
    return type(layer_class.__name__, (RecurrentLayer, layer_class), {})


def get_recurrent_class(module: nn.Module) -> type[nn.Module] | None:
    """Return a subclass of the module's class that keeps its states in the engine's cache; None if the module is no
    recurrent layer."""
    return _with_states(type(module)) if is_recurrent(module) else None


def make_dense(slots: np.ndarray, unused_slot: int, device: torch.device) -> StateRows:
    """Return the rows for the first tokens of a forward, one token of each slot in `slots`. Entries equal to
    `unused_slot` are padding."""
    count = len(slots)
    if (slots != unused_slot).all() and slots[-1] - slots[0] == count - 1:  # adjacent: no copy is needed
        return StateRows(slice(0, count), slice(int(slots[0]), int(slots[-1]) + 1), count)
    return StateRows(slice(0, count), torch.from_numpy(slots).to(device), count)


def make_chunks(
    slots: np.ndarray, token_counts: np.ndarray, positions: np.ndarray, first_token: int, device: torch.device
) -> list[StateRows]:
    """Return the rows that prefill the slots `slots`, with `token_counts` tokens each from position `positions` on.
    Their tokens begin at flat index `first_token`. Rows of equal length share an entry, unless only some of them begin
    their sequence."""
    rows: list[StateRows] = []
    token_starts = first_token + token_counts.cumsum() - token_counts
    groups: dict[tuple[int, bool], list[int]] = {}
    for index in range(len(slots)):
        groups.setdefault((int(token_counts[index]), int(positions[index]) == 0), []).append(index)
    for (num_tokens, is_new), indices in groups.items():
        tokens = (token_starts[indices][:, None] + np.arange(num_tokens)).ravel()
        group_slots = torch.from_numpy(slots[indices]).to(device)
        flat_tokens: slice | torch.Tensor = slice(int(tokens[0]), int(tokens[-1]) + 1)
        if len(tokens) != tokens[-1] + 1 - tokens[0]:
            flat_tokens = torch.from_numpy(tokens).to(device)
        rows.append(StateRows(flat_tokens, group_slots, len(indices), is_new))
    return rows
