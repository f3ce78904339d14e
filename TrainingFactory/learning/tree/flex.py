"""Attention over a prefix tree on a GPU: one FlexAttention call over the flat tokens, with a block mask."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from TrainingFactory.data.packing import Node, Pack
from TrainingFactory.learning.tree.parts import below

BLOCK = 128  # FlexAttention's own


def seen_pairs(pack: Pack) -> np.ndarray:
    """Count the (token, seen token) pairs in each block, node by node: all N x N have no room in a long pack."""
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


def whole_blocks(pack: Pack) -> Pack:
    """Return the pack with tokens of no use behind it, so that all blocks are full: FlexAttention is quicker then."""
    size = len(pack.token_ids)
    more = -size % BLOCK
    ids, positions = np.pad(pack.token_ids, (0, more)), np.append(pack.positions, np.arange(more))
    nodes = [*pack.nodes, Node(size, more, 0, -1, 0)] if more else pack.nodes
    return replace(pack, token_ids=ids, positions=positions, nodes=nodes)


def block_mask(pack: Pack, device: torch.device) -> Any:
    """A token sees those before it whose node it is in or below: these follow each other in the flat tree."""
    from torch.nn.attention.flex_attention import BlockMask

    ends, lengths = [each.stop for each in below(pack.nodes)], [node.length for node in pack.nodes]
    end = torch.from_numpy(np.repeat(ends, lengths).astype(np.int32)).to(device)

    def sees(_b: Any, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < end[k])

    pairs, size = torch.from_numpy(seen_pairs(pack)), len(pack.token_ids)
    whole = pairs == BLOCK * BLOCK  # these need no look at the mask
    parts: list[torch.Tensor] = []
    for blocks in ((pairs > 0) & ~whole, whole):  # how many in each row, and which, those first
        parts += [blocks.sum(-1, dtype=torch.int32), (~blocks).int().argsort(dim=-1, stable=True).int()]
    counts, which, whole_counts, whole_which = (part[None, None].to(device) for part in parts)
    return BlockMask.from_kv_blocks(
        counts, which, whole_counts, whole_which, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size)
    )


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float
) -> torch.Tensor:
    return _compiled()(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1],
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # its kernel for short queries fails on some shapes
    )  # fmt: skip
