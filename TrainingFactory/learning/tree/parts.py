"""Tree attention on a CPU, in parts: in some, the tokens of a node attend to each other; in the others, all descendants
of a node attend to that node. No key is copied to the branches that attend to it.

Each part computes its own softmax and log-sum-exp; these merge the parts into one softmax over the whole path. In the
backward pass every part has the gradient that it has within the merged softmax, so it needs only the merged output and
log-sum-exp.

Legend: N tokens of the tree, n nodes of a part padded to T queries and A keys, H query heads, K key heads,
G = H / K, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from TrainingFactory.data.packing import TreeNode
from TrainingFactory.learning.tree.capped import compute_capped_attention, compute_capped_gradients

ATEN_OPS = torch.ops.aten
FREE_PADDING = 256  # padding tokens that cost no more than one further part


@dataclass(slots=True)
class PaddedRows:
    """The queries or the keys of a part: n rows of tokens, padded to one length. A single row is a slice."""

    num_rows: int  # n
    padded_tokens: torch.Tensor | slice  # [n * length] token indices, padded with 0
    valid_positions: torch.Tensor | None  # positions in `padded_tokens` that are not padding; None: all
    tokens: torch.Tensor | slice  # token indices without padding

    def pad_states(self, states: torch.Tensor) -> torch.Tensor:
        """Arrange the states of the tree's tokens in padded rows: [N, ...] -> [n, length, ...]"""
        if isinstance(self.padded_tokens, slice):
            return states[self.padded_tokens][None]
        return states.index_select(0, self.padded_tokens).unflatten(0, (self.num_rows, -1))

    def remove_padding(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states of padded rows without the padding: [n, length, ...] -> [real tokens, ...]"""
        states = states.flatten(0, 1)
        return states if self.valid_positions is None else states.index_select(0, self.valid_positions)


@dataclass(slots=True)
class TreePart:
    queries: PaddedRows
    keys: PaddedRows
    is_causal: bool  # nodes against themselves: causal
    bias: torch.Tensor | None  # additive mask [n, 1, 1 or T, A] or [1, 1, T, A]; None: nothing is masked
    _masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def get_mask(self, num_groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask for queries [n, K, G * T, d], cached for the following layers."""
        if self.bias is None:
            return None
        if (num_groups, dtype) not in self._masks:
            num_repeats = num_groups if self.bias.shape[2] > 1 else 1  # one mask per query, or one for all
            self._masks[num_groups, dtype] = self.bias.to(dtype).repeat(1, 1, num_repeats, 1)
        return self._masks[num_groups, dtype]


def plan_parts(nodes: list[TreeNode], device: torch.device) -> list[TreePart]:
    """Return the parts of the attention: first of each node's tokens to each other, then level by level of descendants
    to their ancestor node."""
    descendants = find_descendant_tokens(nodes)
    levels: list[list[int]] = [[] for _ in range(1 + max(node.level for node in nodes))]
    for index, node in enumerate(nodes):
        levels[node.level].append(index)
    parts = plan_node_parts(nodes, device)
    for indices in levels:
        parent_indices = [index for index in indices if len(descendants[index])]
        if parent_indices:
            queries, _ = pad_rows([descendants[index] for index in parent_indices], device)
            keys, is_token = pad_rows([_get_token_range(nodes[index]) for index in parent_indices], device)
            mask = torch.where(torch.from_numpy(is_token), 0.0, -torch.inf)[:, None, None].to(device)
            parts.append(TreePart(queries, keys, False, None if keys.valid_positions is None else mask))
    return parts


def plan_node_parts(nodes: list[TreeNode], device: torch.device) -> list[TreePart]:
    """Return the parts in which the tokens of a node attend to each other. Nodes of similar length share a part."""
    parts = []
    for indices in _group_nodes(nodes):
        padded_rows, _ = pad_rows([_get_token_range(nodes[index]) for index in indices], device)
        length = max(nodes[index].length for index in indices)
        causal_mask = torch.full((length, length), -torch.inf).triu(1)[None, None].to(device)
        parts.append(TreePart(padded_rows, padded_rows, True, causal_mask if length > 1 else None))
    return parts


def _group_nodes(nodes: list[TreeNode]) -> list[list[int]]:
    return group_by_length([node.length for node in nodes])


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Group rows of similar length, trading the fixed cost of a part against padding, whose cost is quadratic."""
    groups: list[list[int]] = []
    max_length = num_tokens = padding = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        is_too_short = max_length > FREE_PADDING and length < 3 / 4 * max_length
        if not groups or is_too_short or padding + max_length - length > max(FREE_PADDING, num_tokens // 2):
            groups.append([])
            max_length, num_tokens, padding = length, 0, 0
        groups[-1].append(index)
        num_tokens += length
        padding += max_length - length
    return groups


def _get_token_range(node: TreeNode) -> range:
    return range(node.start, node.start + node.length)


def find_descendant_tokens(nodes: list[TreeNode]) -> list[range]:
    """Return the token range of each node's descendants. The range follows the node's own tokens, because nodes are in
    depth-first order."""
    node_ends = [node.start + node.length for node in nodes]
    for index in reversed(range(len(nodes))):
        parent = nodes[index].parent
        if parent >= 0:
            node_ends[parent] = max(node_ends[parent], node_ends[index])
    return [range(node.start + node.length, end) for node, end in zip(nodes, node_ends, strict=True)]


def pad_rows(rows: list[range], device: torch.device) -> tuple[PaddedRows, np.ndarray]:
    """Return these token ranges as padded rows, and a mask [n, length] that is False at padding."""
    starts, lengths = np.array([row.start for row in rows]), np.array([len(row) for row in rows])
    columns = np.arange(lengths.max())
    is_token = columns < lengths[:, None]
    if len(rows) == 1:
        token_range = slice(rows[0].start, rows[0].stop)
        return PaddedRows(1, token_range, None, token_range), is_token
    return _make_padded_rows(np.where(is_token, starts[:, None] + columns, 0), is_token, device), is_token


def pad_indices(rows: list[np.ndarray], device: torch.device) -> tuple[PaddedRows, np.ndarray]:
    """Return rows of token indices, not necessarily consecutive, as padded rows, with a mask [n, length] that is False
    at padding."""
    lengths = np.array([len(row) for row in rows])
    is_token = np.arange(lengths.max()) < lengths[:, None]
    indices = np.zeros(is_token.shape, np.int64)
    indices[is_token] = np.concatenate(rows)
    return _make_padded_rows(indices, is_token, device), is_token


def _make_padded_rows(indices: np.ndarray, is_token: np.ndarray, device: torch.device) -> PaddedRows:
    padded_tokens = torch.from_numpy(indices.ravel()).to(device)
    if is_token.all():
        return PaddedRows(len(indices), padded_tokens, None, padded_tokens)
    valid_indices = torch.from_numpy(np.flatnonzero(is_token)).to(device)
    return PaddedRows(len(indices), padded_tokens, valid_indices, padded_tokens[valid_indices])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parts: list[TreePart],
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute tree attention part by part: [N, H, d], [N, K, d], [N, K, dv] -> [N, H, dv]. `softcap` caps the scores by
    tanh; `sinks` [H] are logits that take part in the softmax without a value."""
    value_size = value.shape[-1]
    padding = key.shape[-1] - value_size  # the kernel needs equal head sizes; zero padding changes nothing
    if padding > 0:
        value = pad(value, (0, padding))
    elif padding < 0:
        query = pad(query, (0, -padding))
        key = pad(key, (0, -padding))
    q = query.unflatten(1, (key.shape[1], -1))  # [N, K, G, d]
    sinks = None if sinks is None else sinks.unflatten(0, (key.shape[1], -1))
    output: Any = _Attention.apply(q, key, value, sinks, parts, scale, softcap)
    return output.flatten(1, 2)[..., :value_size]


def _fold_heads(queries: torch.Tensor) -> torch.Tensor:
    """Fold queries [n, T, K, G, d] to [n, K, G * T, d]: query heads that share a key head become query positions."""
    return queries.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _unfold_heads(folded_queries: torch.Tensor, num_groups: int) -> torch.Tensor:
    return folded_queries.unflatten(2, (num_groups, -1)).permute(0, 3, 1, 2, 4)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        parts: list[TreePart],
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        num_groups, dtype = q.shape[2], torch.promote_types(q.dtype, torch.float32)
        output = torch.empty(q.shape, dtype=dtype, device=q.device)  # [N, K, G, d]
        logsumexp = torch.empty(*q.shape[:3], 1, dtype=dtype, device=q.device)  # log-sum-exp
        inputs: list[torch.Tensor] = []
        for part in parts:
            queries = part.queries
            part_q = _fold_heads(queries.pad_states(q))  # [n, K, G * T, d]
            part_k = part.keys.pad_states(k).transpose(1, 2)  # [n, K, A, d]
            part_v = part.keys.pad_states(v).transpose(1, 2)
            inputs += [part_q, part_k, part_v]
            mask = part.get_mask(num_groups, q.dtype)
            if softcap is None:
                part_output, part_lse = ATEN_OPS._scaled_dot_product_flash_attention_for_cpu(
                    part_q, part_k, part_v, attn_mask=mask, scale=scale
                )
            else:
                part_output, part_lse = compute_capped_attention(part_q, part_k, part_v, mask, scale, softcap)
            part_output = queries.remove_padding(_unfold_heads(part_output, num_groups)).to(dtype)
            part_lse = queries.remove_padding(_unfold_heads(part_lse[..., None], num_groups))
            if not part.is_causal:
                previous_logsumexp = logsumexp[queries.tokens]
                part_output = torch.lerp(
                    output[queries.tokens], part_output, torch.sigmoid(part_lse - previous_logsumexp)
                )
                part_lse = torch.logaddexp(previous_logsumexp, part_lse)
            output[queries.tokens], logsumexp[queries.tokens] = part_output, part_lse
        if sinks is not None:
            sink_logits = sinks.float()[..., None]
            output *= torch.sigmoid(logsumexp - sink_logits)
            logsumexp = torch.logaddexp(logsumexp, sink_logits)
        output = output.to(q.dtype)
        ctx.save_for_backward(output, logsumexp, sinks, *inputs)
        ctx.parts, ctx.scale, ctx.softcap, ctx.key_shape = parts, scale, softcap, k.shape
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output, logsumexp, sinks, *inputs = ctx.saved_tensors
        num_groups = output.shape[2]
        input_grads = [output.new_zeros(shape) for shape in (output.shape, ctx.key_shape, ctx.key_shape)]
        output_grad = grads[0].contiguous()
        for index, part in enumerate(ctx.parts):
            queries, keys = part.queries, part.keys
            grad = queries.pad_states(output_grad)
            # Padded queries must not contribute to the gradients of keys and values.
            if queries.valid_positions is not None:
                is_token = grad.new_zeros(grad.shape[:2].numel()).index_fill_(0, queries.valid_positions, 1.0)
                grad = grad * is_token.view(*grad.shape[:2], 1, 1, 1)
            part_lse = _fold_heads(queries.pad_states(logsumexp))[..., 0].contiguous()
            part_q, part_k, part_v = inputs[3 * index : 3 * index + 3]
            mask = part.get_mask(num_groups, output.dtype)
            part_output = _fold_heads(queries.pad_states(output))
            gradient_inputs = _fold_heads(grad), part_q, part_k, part_v, part_output, part_lse
            if ctx.softcap is None:
                part_grads = ATEN_OPS._scaled_dot_product_flash_attention_for_cpu_backward(
                    *gradient_inputs, 0.0, False, attn_mask=mask, scale=ctx.scale
                )
            else:
                part_grads = compute_capped_gradients(*gradient_inputs, mask, ctx.scale, ctx.softcap)
            input_grads[0][queries.tokens] += queries.remove_padding(_unfold_heads(part_grads[0], num_groups))
            for total_grad, part_grad in zip(input_grads[1:], part_grads[1:], strict=True):
                total_grad[keys.tokens] += keys.remove_padding(part_grad.transpose(1, 2))
        return (*input_grads, _compute_sink_gradient(output_grad, output, logsumexp, sinks), None, None, None)


def _compute_sink_gradient(
    output_grad: torch.Tensor, output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of the sinks [K, G]. A sink is a softmax entry whose value is zero."""
    if sinks is None:
        return None
    sink_probability = torch.exp(sinks.float()[..., None] - logsumexp)
    output_products = (output_grad.float() * output.float()).sum(-1, keepdim=True)
    return -(sink_probability * output_products).sum((0, -1)).to(sinks.dtype)
