"""Attention over a prefix tree: every token sees the tokens before it on its own path to the top.

On a CPU it goes by levels: the nodes of one level are a padded batch, each with the keys of its whole path. On
a GPU it is one FlexAttention call over the flat tokens with a block mask. The layers around attention see each
token of the tree once, so cost follows the tree, not the square of the pack.

Legend: N tokens of the tree, n nodes of a level padded to T tokens, A keys on the longest path to them,
H query heads, K key heads, G = H / K, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from TrainingFactory.data.packing import Node, Pack

ATTENTION = "tfactory_tree"
# What models hand to their attention function and what changes its result.
NOT_HANDLED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


@dataclass(slots=True)
class Level:
    nodes: int  # n
    tokens: torch.Tensor  # [n * T] flat indices of the queries, padded with 0
    keys: torch.Tensor  # [n * A] flat indices of the keys on each node's path, padded with 0
    mask: torch.Tensor  # [n, 1, T, A], additive
    grouped: torch.Tensor | None = None  # [n, 1, G T, A], made by the first layer for the others


@dataclass(slots=True)
class TreePlan:
    """Travels through the model as a keyword argument. One for each pack."""

    levels: list[Level]
    place: torch.Tensor  # [N] where a token stands in the levels' outputs, one after the other
    mask: Any = None  # FlexAttention's block mask, on a GPU


def plan_tree(pack: Pack, device: torch.device) -> TreePlan:
    if device.type == "cuda":
        return TreePlan([], torch.zeros(0), _block_mask(pack, device))
    by_level: list[list[int]] = [[] for _ in range(1 + max(node.level for node in pack.nodes))]
    for number, node in enumerate(pack.nodes):
        by_level[node.level].append(number)
    levels, place, done = [], np.zeros(len(pack.token_ids), np.int64), 0
    for numbers in by_level:
        tokens, real = grid([span(pack.nodes[number]) for number in numbers])
        keys, seen = grid([_path(pack, number) for number in numbers])
        place[tokens[real]] = done + np.flatnonzero(real)
        done += tokens.size
        sees = seen[:, None] & (pack.positions[keys][:, None] <= pack.positions[tokens][:, :, None])
        sees[:, :, 0] |= ~real  # padding queries see one key, whose weight nobody asks for
        mask = np.where(sees, np.float32(0), np.float32(-np.inf))[:, None]
        arrays = (torch.from_numpy(array).to(device) for array in (tokens.ravel(), keys.ravel(), mask))
        levels.append(Level(len(numbers), *arrays))
    return TreePlan(levels, torch.from_numpy(place).to(device))


def span(node: Node) -> np.ndarray:
    return np.arange(node.start, node.start + node.length)


def _path(pack: Pack, number: int) -> np.ndarray:
    """Flat indices of all tokens on the path to a node, its own included."""
    spans = []
    while number >= 0:
        spans.insert(0, span(pack.nodes[number]))
        number = pack.nodes[number].parent
    return np.concatenate(spans)


def grid(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of different length as one array padded with 0, and which places are real."""
    lengths = np.array([len(row) for row in rows])
    real = np.arange(lengths.max()) < lengths[:, None]
    grid = np.zeros(real.shape, np.int64)
    grid[real] = np.concatenate(rows)
    return grid, real


def level_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, level: Level, scale: float
) -> torch.Tensor:
    """[N, H, d], [N, K, d], [N, K, dv] -> [n * T, H, dv]. The query heads that share a key head become query
    positions of one call, so that keys are not repeated for them."""
    n, length = level.nodes, level.mask.shape[2]
    kv_heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    q = query.index_select(0, level.tokens).view(n, length, kv_heads, groups, -1)
    q = q.permute(0, 2, 3, 1, 4).reshape(n, kv_heads, groups * length, -1)  # [n, K, G T, d]
    k = key.index_select(0, level.keys).view(n, -1, kv_heads, key.shape[-1]).transpose(1, 2)  # [n, K, A, d]
    v = value.index_select(0, level.keys).view(n, -1, kv_heads, value.shape[-1]).transpose(1, 2)
    if level.grouped is None or level.grouped.shape[2] != groups * length:
        level.grouped = level.mask.to(q.dtype).repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=level.grouped, scale=scale)
    out = out.view(n, kv_heads, groups, length, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(n * length, kv_heads * groups, -1)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, N, d]
    key: torch.Tensor,  # [1, K, N, d]
    value: torch.Tensor,  # [1, K, N, dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    tfactory_tree: TreePlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function. [1, N, H, dv] out. Dropout of attention weights is not applied."""
    if tfactory_tree is None:
        raise ValueError(f"{ATTENTION!r} is the learner's own attention; models do not use it by name")
    if odd := [name for name in NOT_HANDLED if kwargs.get(name) is not None]:
        raise ValueError(f"tree attention knows no {odd[0]}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if tfactory_tree.mask is not None:
        return _flex(query, key, value, tfactory_tree.mask, scale).transpose(1, 2), None
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    parts = [level_attention(q, k, v, level, scale) for level in tfactory_tree.levels]
    return (torch.cat(parts) if len(parts) > 1 else parts[0])[tfactory_tree.place][None], None


BLOCK = 128  # FlexAttention's own


def seen_pairs(pack: Pack) -> np.ndarray:
    """How many (token, seen token) pairs lie in each block, [N / BLOCK, N / BLOCK] rounded up. Counted node by
    node, because a mask of all N x N pairs is what a long pack has no memory for."""
    blocks = -(-len(pack.token_ids) // BLOCK)
    pairs = np.zeros((blocks, blocks), np.int64)
    shares = [_share(node) for node in pack.nodes]
    for node, (first, own) in zip(pack.nodes, shares, strict=True):
        end = first + len(own)
        # Its own tokens: all of the blocks before, and of the same block what is not later.
        pairs[first:end, first:end] += np.tril(np.outer(own, own), -1) + np.diag(own * (own + 1) // 2)
        above = node.parent
        while above >= 0:
            start, theirs = shares[above]
            pairs[first:end, start : start + len(theirs)] += np.outer(own, theirs)
            above = pack.nodes[above].parent
    return pairs


def _share(node: Node) -> tuple[int, np.ndarray]:
    """The first block that a node has tokens in, and how many it has in that one and each further one."""
    borders = np.arange(node.start // BLOCK, (node.start + node.length - 1) // BLOCK + 2) * BLOCK
    return node.start // BLOCK, np.diff(borders.clip(node.start, node.start + node.length))


def _block_mask(pack: Pack, device: torch.device) -> Any:
    """A token sees another if that one's node is on its path (nodes are numbered so that all below a node
    follow it) and it does not come later in the row."""
    from torch.nn.attention.flex_attention import BlockMask

    ends = list(range(1, len(pack.nodes) + 1))  # one past the last node below each
    for number in reversed(range(len(pack.nodes))):
        parent = pack.nodes[number].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[number])
    lengths = [node.length for node in pack.nodes]
    number = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
    end = torch.from_numpy(np.repeat(ends, lengths)).to(device)
    position = torch.from_numpy(pack.positions).to(device)

    def sees(_b: Any, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        on_path = (number[k] <= number[q]) & (number[q] < end[k])
        return on_path & (position[k] <= position[q])

    pairs, size = torch.from_numpy(seen_pairs(pack)), len(pack.token_ids)
    whole = pairs == BLOCK * BLOCK  # these need no look at the mask
    parts: list[torch.Tensor] = []
    for blocks in ((pairs > 0) & ~whole, whole):  # how many in each row, and which, those first
        parts += [blocks.sum(-1, dtype=torch.int32), (~blocks).int().argsort(dim=-1, stable=True).int()]
    counts, which, whole_counts, whole_which = (part[None, None].to(device) for part in parts)
    return BlockMask.from_kv_blocks(
        counts, which, whole_counts, whole_which, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size)
    )


_compiled: list[Any] = []


def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=True))
    return _compiled[0](
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1],
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # its kernel for short queries fails on some shapes
    )  # fmt: skip


# No mask function goes with it: transformers builds no mask for an attention it has no mask function for.
AttentionInterface.register(ATTENTION, tree_attention)
