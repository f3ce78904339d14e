"""Attention with soft-capped scores on a CPU: cap * tanh(score / cap), which the flash kernel cannot compute. Queries
are processed in blocks, so that the matrix of scores stays small. The backward pass computes the scores again.

Legend: n rows, K key heads, T queries, A keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_SCORES = 1 << 22  # largest number of scores in one block


def compute_capped_attention(
    q: torch.Tensor,  # [n, K, T, d]
    k: torch.Tensor,  # [n, K, A, d]
    v: torch.Tensor,  # [n, K, A, d]
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [n, K, T, d] and the log-sum-exp [n, K, T] of the capped scores."""
    outputs = []
    logsumexps = []
    for block in _split_blocks(q, k):
        scores, _ = _compute_scores(q, k, mask, scale, softcap, block)
        block_logsumexp = scores.logsumexp(-1)
        outputs.append(torch.exp(scores - block_logsumexp[..., None]) @ v.float())
        logsumexps.append(block_logsumexp)
    return torch.cat(outputs, 2), torch.cat(logsumexps, 2)


def compute_capped_gradients(
    output_grad: torch.Tensor,  # [n, K, T, d]
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,  # [n, K, T, d] of the whole softmax, of which this is one part
    logsumexp: torch.Tensor,  # [n, K, T] its log-sum-exp
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v."""
    query_grads = []
    key_grad = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    value_grad = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    for block in _split_blocks(q, k):
        scores, slope = _compute_scores(q, k, mask, scale, softcap, block)
        weights = torch.exp(scores - logsumexp[:, :, block, None])
        block_grad = output_grad[:, :, block].float()
        value_grad += weights.mT @ block_grad
        mean_grad = (block_grad * output[:, :, block].float()).sum(-1, keepdim=True)
        score_grad = weights * (block_grad @ v.float().mT - mean_grad) * slope
        query_grads.append(score_grad @ k.float())
        key_grad += score_grad.mT @ q[:, :, block].float()
    return torch.cat(query_grads, 2).to(q.dtype), key_grad.to(k.dtype), value_grad.to(v.dtype)


def _split_blocks(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    block_length = max(1, BLOCK_SCORES // (k.shape[0] * k.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], block_length):
        yield slice(start, start + block_length)


def _compute_scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float, block: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the capped and masked scores of a block of queries, and their derivative by the products q @ k."""
    tanh_scores = torch.tanh((q[:, :, block].float() @ k.float().mT) * (scale / softcap))
    scores = tanh_scores * softcap
    if mask is not None:
        scores = scores + (mask[:, :, block] if mask.shape[2] > 1 else mask)
    return scores, (1 - tanh_scores.square()) * scale
