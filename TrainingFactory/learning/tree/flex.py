"""Tree attention on a GPU: one FlexAttention call over the flattened tokens, with a block mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from TrainingFactory.data.packing import Pack, TreeNode
from TrainingFactory.learning.tree.parts import find_descendant_tokens
from TrainingFactory.learning.tree.reach import AttentionRange

MaskMod = Callable[..., torch.Tensor]
BLOCK_SIZE = 128  # FlexAttention's default block size
MAX_PIPELINED_SIZE = 256  # larger heads leave no shared memory for loading the next block early


def count_visible_pairs(pack: Pack) -> np.ndarray:
    """Count the unmasked (query, key) pairs in each block, node by node: an N x N mask of a long pack is too large."""
    num_blocks = -(-len(pack.token_ids) // BLOCK_SIZE)
    pair_counts = np.zeros((num_blocks, num_blocks), np.int64)
    block_counts = [_count_block_tokens(node) for node in pack.nodes]
    for node, (first_block, counts) in zip(pack.nodes, block_counts, strict=True):
        end = first_block + len(counts)
        # Within the node: all pairs with earlier blocks, and the causal half within a block.
        pair_counts[first_block:end, first_block:end] += np.tril(np.outer(counts, counts), -1) + np.diag(
            counts * (counts + 1) // 2
        )
        ancestor = node.parent
        while ancestor >= 0:
            start, key_counts = block_counts[ancestor]
            pair_counts[first_block:end, start : start + len(key_counts)] += np.outer(counts, key_counts)
            ancestor = pack.nodes[ancestor].parent
    return pair_counts


def _count_block_tokens(node: TreeNode) -> tuple[int, np.ndarray]:
    """Return the index of the first block with tokens of the node, and the node's number of tokens in this and each
    following block."""
    first_block, node_end = node.start // BLOCK_SIZE, node.start + node.length
    bounds = np.arange(first_block, (node_end - 1) // BLOCK_SIZE + 2) * BLOCK_SIZE
    return first_block, np.diff(bounds.clip(node.start, node_end))


def pad_to_blocks(pack: Pack) -> Pack:
    """Pad the pack to a multiple of the block size, because FlexAttention is faster on full blocks."""
    num_tokens = len(pack.token_ids)
    padding = -num_tokens % BLOCK_SIZE
    ids, positions = np.pad(pack.token_ids, (0, padding)), np.append(pack.positions, np.arange(padding))
    nodes = [*pack.nodes, TreeNode(num_tokens, padding, 0, -1, 0)] if padding else pack.nodes
    return replace(pack, token_ids=ids, positions=positions, nodes=nodes)


def make_block_mask(pack: Pack, device: torch.device, attention_range: AttentionRange | None = None) -> Any:
    """Return FlexAttention's mask: a key is visible to later tokens of its node and the node's descendants, within
    their `attention_range` (None: without limit)."""
    from torch.nn.attention.flex_attention import BlockMask

    end_tokens = [tokens.stop for tokens in find_descendant_tokens(pack.nodes)]
    lengths = [node.length for node in pack.nodes]
    end_by_key = torch.from_numpy(np.repeat(end_tokens, lengths).astype(np.int32)).to(device)

    def is_visible_key(_batch: Any, _head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < end_by_key[k])

    pair_counts, num_tokens = torch.from_numpy(count_visible_pairs(pack)), len(pack.token_ids)
    is_full_block = pair_counts == BLOCK_SIZE * BLOCK_SIZE  # blocks in which no pair is masked
    is_visible = pair_counts > 0
    mask_mod = is_visible_key
    if attention_range is not None:
        first_visible = attention_range.get_first_visible(pack.positions)
        is_partly_near, is_fully_near = map(
            torch.from_numpy, _find_near_blocks(pack.positions, first_visible)
        )
        is_visible &= is_partly_near
        is_full_block &= is_fully_near
        mask_mod = _restrict_to_range(is_visible_key, pack.positions, first_visible, device)
    tensors: list[torch.Tensor] = []
    # The number of key blocks per query block, and their indices first.
    for blocks in (is_visible & ~is_full_block, is_full_block):
        tensors += [blocks.sum(-1, dtype=torch.int32), (~blocks).int().argsort(dim=-1, stable=True).int()]
    counts, indices, full_counts, full_indices = (tensor[None, None].to(device) for tensor in tensors)
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=(num_tokens, num_tokens),
    )


def _restrict_to_range(
    is_visible_key: MaskMod, positions: np.ndarray, first_visible: np.ndarray, device: torch.device
) -> MaskMod:
    """Restrict a mask to keys at or after each query's first visible position. The positions are read from tensors, so
    that one compiled kernel serves every window."""
    position, first_position = (
        torch.from_numpy(array.astype(np.int32)).to(device) for array in (positions, first_visible)
    )

    def is_near_key(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return is_visible_key(batch, head, q, k) & (position[k] >= first_position[q])

    return is_near_key


def _find_near_blocks(positions: np.ndarray, first_visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two masks of blocks, judged by positions alone: blocks in which some (query, key) pair may be within the
    attention range, and blocks in which all pairs are."""
    starts = np.arange(0, len(positions), BLOCK_SIZE)
    first_key, last_key = (ufunc.reduceat(positions, starts) for ufunc in (np.minimum, np.maximum))
    min_visible, max_visible = (ufunc.reduceat(first_visible, starts) for ufunc in (np.minimum, np.maximum))
    return last_key >= min_visible[:, None], first_key >= max_visible[:, None]


@functools.cache
def _compile_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Masks, sinks, caps, head sizes and gradients each need a kernel; beyond the limit, torch runs without kernels.
    recompile_limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _make_score_mod(softcap: float) -> Callable[..., torch.Tensor]:
    def cap_score(score: torch.Tensor, _batch: Any, _head: Any, _q: Any, _k: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap_score


def attend_on_gpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scale: float,
    softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute masked attention by FlexAttention: [1, H, N, d], [1, K, N, d], [1, K, N, dv] -> [1, H, N, dv]. `softcap`
    and `sinks` [H] as in `attend`."""
    from torch.nn.attention.flex_attention import AuxRequest

    # The kernel for short queries fails on some shapes.
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    if query.shape[-1] > MAX_PIPELINED_SIZE:
        options["num_stages"] = 1
    attention_result = _compile_flex()(
        query, key, value, score_mod=None if softcap is None else _make_score_mod(softcap), block_mask=mask,
        scale=scale, enable_gqa=query.shape[1] != key.shape[1], kernel_options=options,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is None:
        return attention_result
    output, aux_output = attention_result
    key_share = torch.sigmoid(
        aux_output.lse - sinks.float()[None, :, None]
    )  # of the keys; the sink has the rest
    return (output * key_share[..., None]).to(output.dtype)
