"""Draw tokens from logits. A draw is one uniform number that depends on seed and position only and inverts the
cumulative distribution, so what is sampled does not depend on who shares the batch (but for rounding)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

BLOCK = 32  # tokens summed at a time when one is drawn
BELOW_ONE = 1 - 2.0**-40
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    """Mix as splitmix64 ends: every bit of the result depends on every bit of z (uint64)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return one number in [0, 1) for each (seed, position); uint64 seeds, float64 out."""
    bits = _mix(_mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(24)) * 2.0**-40  # 40 bits: times a total in float64 it stays under the total


def restrict(
    weights: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Zero what top-k, then top-p (of what top-k left), then min-p (of the largest) exclude. [M, V]; limits [M]"""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    top_k = torch.where(top_k > 0, top_k, weights.shape[-1])  # 0 is off
    kept = torch.where(ranks < top_k[:, None], ordered, 0.0)
    total = kept.cumsum(-1, dtype=torch.float64)
    before = total - kept  # the mass of everything more likely
    inside = (before < top_p[:, None] * total[:, -1:]) | (top_p[:, None] >= 1)
    inside &= ordered >= min_p[:, None] * ordered[:, :1]
    return torch.zeros_like(weights).scatter_(-1, order, torch.where(inside, kept, 0.0))


def draw(
    weights: torch.Tensor, uniform: torch.Tensor, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first token at which the running sum of the weights [M, V] exceeds uniform [M] times their total,
    and that total, both [M, 1]; never a token of weight zero. With `rows` [M], draw i is from that row."""
    # First the block of tokens, then the token in it: one pass over the vocabulary, and no long sum in float32, in
    # which a token of probability 3e-8 would drown.
    if rest := -weights.shape[-1] % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, rest))
    blocks = weights.unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double()  # [M, blocks]
    ends = sums.cumsum(-1)
    if rows is not None:
        sums, ends = sums[rows], ends[rows]
    total = ends[:, -1:]
    point = uniform[:, None] * total
    block = torch.searchsorted(ends, point, right=True).clamp_(max=ends.shape[-1] - 1)  # [M, 1]; NaN is last
    size = sums.gather(1, block)
    # How far into the block; under 1 in spite of rounding, so that the point lies before its end.
    share = ((point - ends.gather(1, block)) / size + 1).clamp_(0, BELOW_ONE)
    if rows is None:
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    else:
        inside = blocks[rows, block[:, 0]]
    inner = inside.cumsum(-1, dtype=torch.float64)
    passed = (inner <= share * inner[:, -1:]).sum(-1, keepdim=True)
    return block * BLOCK + passed, total


def pick(
    logits: torch.Tensor,  # [M, V]
    uniform: torch.Tensor,  # [M] float64
    temperature: torch.Tensor | None = None,  # [M], 0 is greedy; None: all are 1
    filters: Sequence[torch.Tensor] = (),  # top-p, top-k and min-p, [M] each
    rows: torch.Tensor | None = None,  # [M]: whose logits each draw is from; None: its own
) -> torch.Tensor:
    """Return [2, M] in float64, which one copy brings to the host: the tokens, and their log-probs under the full
    softmax at the row's temperature (at temperature 1 for greedy rows)."""
    logits = logits.float()
    if temperature is not None:
        logits, rows = logits if rows is None else logits[rows], None
        logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None].float()
    shifted = logits - logits.amax(-1, keepdim=True)
    weights = shifted.exp()
    tokens, total = draw(weights, uniform, rows)
    if filters:
        tokens, _ = draw(restrict(weights, *filters), uniform)
    if temperature is not None:
        tokens = torch.where(temperature[:, None] > 0, tokens, logits.argmax(-1, keepdim=True))
    # Where logits are NaN the token may be out of range; the caller sees it in the log-prob.
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    chosen = shifted.gather(-1, tokens) if rows is None else shifted[rows, tokens[:, 0]][:, None]
    logprobs = chosen - total.log()
    return torch.cat((tokens.double(), logprobs), 1).T


def split_picked(picked: torch.Tensor | None, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens, logprobs = np.zeros((2, len(live))) if picked is None else picked.cpu().numpy()
    return tokens.astype(np.int64), logprobs


def finite(logprobs: np.ndarray) -> np.ndarray:
    if not np.isfinite(logprobs).all():
        raise FloatingPointError("the model gave NaN or infinite logits; there is nothing to sample")
    return logprobs
