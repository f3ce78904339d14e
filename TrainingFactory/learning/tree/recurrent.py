"""Recurrent layers over a prefix tree: each node begins with the state at the end of its parent.

All other operations of the model see one flat row. A recurrent layer is called several times: level by level, the nodes
that have children with their exact length, because their last states are needed, and the leaves padded together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from TrainingFactory.data.packing import TreeNode
from TrainingFactory.models.recurrent import RowStates, find_recurrent_layers, get_cache_argument

MAX_PADDING_TOKENS = 64  # a leaf is padded by more tokens only if they are less than half of its own


@dataclass(slots=True)
class Segment:
    """The tokens that a recurrent layer processes for one node of the tree."""

    tokens: np.ndarray  # flat indices; begins with tokens of ancestors that are too short for a call
    num_repeated: int  # number of those tokens
    parent: int  # segment whose last state it begins with; -1: none
    level: int  # number of segments before it
    has_children: bool


class SegmentBatch(NamedTuple):
    """Segments that a recurrent layer processes in one call."""

    tokens: torch.Tensor  # [P, T] flat indices; padded with the last token of the row
    output_indices: torch.Tensor  # indices in [P * T] of the outputs that are not padding
    output_tokens: torch.Tensor  # flat indices of the tokens of these outputs
    parents: list[int]  # [P] segments whose last states begin the rows; empty: the rows begin here
    saved_segments: list[int]  # [P] segments whose last states others need; empty: none


def plan_segments(nodes: Sequence[TreeNode], device: torch.device) -> list[SegmentBatch]:
    segments = _make_segments(nodes)
    groups: dict[tuple[int, bool, int], list[int]] = {}  # by level, whether rows begin here, and length
    sorted_indices = sorted(range(len(segments)), key=lambda index: -len(segments[index].tokens))
    longest_leaves: dict[tuple[int, bool], int] = {}  # of the current group of leaves
    for index in sorted_indices:
        segment = segments[index]
        length, leaf_key = len(segment.tokens), (segment.level, segment.parent < 0)
        if not segment.has_children:
            if longest_leaves.get(leaf_key, 1 << 62) - length > max(MAX_PADDING_TOKENS, length // 2):
                longest_leaves[leaf_key] = length
            length = -longest_leaves[leaf_key]
        groups.setdefault((*leaf_key, length), []).append(index)
    return [
        _make_batch(segments, groups[key], device, is_first=key[1], keeps_states=key[2] > 0)
        for key in sorted(groups, key=lambda key: key[0])
    ]


def _make_segments(nodes: Sequence[TreeNode]) -> list[Segment]:
    """Return a segment for each node. The children of a node with a single token begin with that token themselves,
    because a call of one token would update its state in place, which has no gradient."""
    parents = {node.parent for node in nodes}
    segments: list[Segment] = []
    for index, node in enumerate(nodes):
        tokens = np.arange(node.start, node.start + node.length)
        parent, level, repeated = node.parent, 0, np.zeros(0, np.int64)
        if parent >= 0:
            parent_segment = segments[parent]
            level = parent_segment.level + 1
            if len(parent_segment.tokens) == 1:
                repeated, parent, level = parent_segment.tokens, parent_segment.parent, parent_segment.level
        joined_tokens = np.concatenate((repeated, tokens))
        has_children = index in parents and len(joined_tokens) > 1
        segments.append(Segment(joined_tokens, len(repeated), parent, level, has_children))
    return segments


def _make_batch(
    segments: list[Segment], indices: list[int], device: torch.device, *, is_first: bool, keeps_states: bool
) -> SegmentBatch:
    rows = [segments[index] for index in indices]
    lengths = np.array([len(row.tokens) for row in rows])
    columns = np.arange(max(int(lengths.max()), 2))
    tokens = np.stack([row.tokens[np.minimum(columns, len(row.tokens) - 1)] for row in rows])
    num_repeated = np.array([row.num_repeated for row in rows])
    is_output = (columns < lengths[:, None]) & (columns >= num_repeated[:, None])
    output_indices = np.flatnonzero(is_output)
    tensors = [torch.from_numpy(array).to(device) for array in (tokens, output_indices, tokens[is_output])]
    parents = [] if is_first else [row.parent for row in rows]
    return SegmentBatch(tensors[0], tensors[1], tensors[2], parents, indices if keeps_states else [])


@contextlib.contextmanager
def use_segmented_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run the recurrent layers over the segments set by `set_segments` inside the block. A nested block changes
    nothing."""
    layers = [layer for layer in find_recurrent_layers(model) if "tfactory_segments" not in layer.__dict__]
    previous_forwards = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.__dict__["tfactory_segments"] = []
        layer.forward = partial(_forward, layer, layer.forward, get_cache_argument(type(layer)))
    try:
        yield
    finally:
        for layer, forward in zip(layers, previous_forwards, strict=True):
            del layer.forward, layer.__dict__["tfactory_segments"]
            if forward is not None:
                layer.forward = forward


def set_segments(model: PreTrainedModel, nodes: Sequence[TreeNode]) -> None:
    """Set the tree for the recurrent layers in the next forward and in its backward pass, which may run the layers
    again."""
    if layers := find_recurrent_layers(model):
        batches = plan_segments(nodes, model.device)
        for layer in layers:
            layer.__dict__["tfactory_segments"] = batches


def _forward(
    layer: Any, forward: Callable[..., Any], cache_name: str, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:  # fmt: skip
    """Compute a recurrent layer for the tokens [1, N, D] of a tree."""
    batches: list[SegmentBatch] = layer.tfactory_segments
    last_states: dict[int, list[torch.Tensor | None]] = {}  # last states of segments, each [1, ...]
    outputs: list[torch.Tensor] = []
    layer_output: Any = None
    for batch in batches:
        initial_states = [
            _join_states(states)
            for states in zip(*(last_states[parent] for parent in batch.parents), strict=True)
        ]
        states = RowStates(layer.layer_idx, *initial_states)
        inputs = hidden_states[0][batch.tokens]
        layer_output = forward(inputs, *args, **{**kwargs, "attention_mask": None, cache_name: states})
        output = layer_output[0] if isinstance(layer_output, tuple) else layer_output
        outputs.append(output.flatten(0, 1).index_select(0, batch.output_indices))
        for row, index in enumerate(batch.saved_segments):
            last_states[index] = [None if state is None else state[row : row + 1] for state in states.tensors]
    indices = torch.cat([batch.output_tokens for batch in batches])
    joined_outputs = torch.cat(outputs)
    flat_rows = joined_outputs.new_zeros(hidden_states.shape[1], joined_outputs.shape[1]).index_copy(
        0, indices, joined_outputs
    )[None]
    return (flat_rows, *layer_output[1:]) if isinstance(layer_output, tuple) else flat_rows


def _join_states(states: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    present_states = [state for state in states if state is not None]
    return torch.cat(present_states) if present_states else None
