"""Tree attention on a GPU: one FlexAttention call over the flattened tokens, with a block mask."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from TrainingFactory.data.packing import Pack, TreeNode
from TrainingFactory.learning.tree.parts import descendant_tokens

BLOCK = 128  # FlexAttention's default block size


def count_visible_pairs(pack: Pack) -> np.ndarray:
    """Count the unmasked (query, key) pairs in each block, node by node: an N x N mask of a long pack is too large."""
    blocks = -(-len(pack.token_ids) // BLOCK)
    pairs = np.zeros((blocks, blocks), np.int64)
    shares = [_share(node) for node in pack.nodes]
    for node, (first, own_share) in zip(pack.nodes, shares, strict=True):
        end = first + len(own_share)
        # Within the node: all pairs with earlier blocks, and the causal half within a block.
        pairs[first:end, first:end] += np.tril(np.outer(own_share, own_share), -1) + np.diag(
            own_share * (own_share + 1) // 2
        )
        ancestor = node.parent
        while ancestor >= 0:
            start, counts = shares[ancestor]
            pairs[first:end, start : start + len(counts)] += np.outer(own_share, counts)
            ancestor = pack.nodes[ancestor].parent
    return pairs


def _share(node: TreeNode) -> tuple[int, np.ndarray]:
    """Return the first block that holds tokens of the node, and the node's token count in it and each further block."""
    boundaries = np.arange(node.start // BLOCK, (node.start + node.length - 1) // BLOCK + 2) * BLOCK
    return node.start // BLOCK, np.diff(boundaries.clip(node.start, node.start + node.length))


def pad_to_blocks(pack: Pack) -> Pack:
    """Pad the pack to a multiple of the block size, because FlexAttention is faster on full blocks."""
    size = len(pack.token_ids)
    padding = -size % BLOCK
    ids, positions = np.pad(pack.token_ids, (0, padding)), np.append(pack.positions, np.arange(padding))
    nodes = [*pack.nodes, TreeNode(size, padding, 0, -1, 0)] if padding else pack.nodes
    return replace(pack, token_ids=ids, positions=positions, nodes=nodes)


def block_mask(pack: Pack, device: torch.device) -> Any:
    """Return FlexAttention's mask: a key is visible to later tokens of its node and the node's descendants."""
    from torch.nn.attention.flex_attention import BlockMask

    end_tokens, lengths = (
        [tokens.stop for tokens in descendant_tokens(pack.nodes)],
        [node.length for node in pack.nodes],
    )
    end = torch.from_numpy(np.repeat(end_tokens, lengths).astype(np.int32)).to(device)

    def sees(_batch: Any, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < end[k])

    pairs, size = torch.from_numpy(count_visible_pairs(pack)), len(pack.token_ids)
    is_full_block = pairs == BLOCK * BLOCK  # blocks in which no pair is masked
    parts: list[torch.Tensor] = []
    for blocks in (
        (pairs > 0) & ~is_full_block,
        is_full_block,
    ):  # number of key blocks per query block, and their indices first
        parts += [blocks.sum(-1, dtype=torch.int32), (~blocks).int().argsort(dim=-1, stable=True).int()]
    counts, indices, full_counts, full_indices = (part[None, None].to(device) for part in parts)
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size)
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
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # the kernel for short queries fails on some shapes
    )  # fmt: skip
