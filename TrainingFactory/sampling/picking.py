"""Drawing of tokens from logits by inverting the cumulative distribution at one uniform number, which depends only on
seed and position. So a sampled token does not depend on the rest of the batch, except for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

Data = TypeVar("Data", bound=np.ndarray | torch.Tensor)  # on the host or on the device
BLOCK_TOKENS = 32  # tokens of the vocabulary per partial sum of a draw
BELOW_ONE = 1 - 2.0**-40
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class DrawInputs(NamedTuple, Generic[Data]):
    """Inputs of M draws besides the logits. Fields that no row needs are None: either the filters alone, or all fields
    except `uniform`."""

    uniform: Data  # [M] float64 in [0, 1)
    temperature: Data | None = None  # [M], 0 is greedy; None: all are 1
    top_p: Data | None = None  # [M]
    top_k: Data | None = None  # [M], 0: off
    min_p: Data | None = None  # [M]

    @property
    def tensors(self) -> list[Data]:
        return [tensor for tensor in self if tensor is not None]

    @property
    def filters(self) -> list[Data]:
        """Return top-p, top-k and min-p; [] if no row has a filter."""
        return self.tensors[2:]


def _mix_bits(z: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64: every bit of the result depends on every bit of z (uint64)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a uniform float64 number in [0, 1) for each pair of a seed (uint64) and a position."""
    bits = _mix_bits(_mix_bits(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(24)) * 2.0**-40  # 40 bits: the product with a float64 total stays below it


def apply_filters(
    weights: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Zero the weights [M, V] that the limits [M] exclude: top-k first, then top-p, then min-p."""
    sorted_weights, token_order = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    top_k = torch.where(top_k > 0, top_k, weights.shape[-1])  # 0 is off
    top_k_mass = torch.where(ranks < top_k[:, None], sorted_weights, 0.0)
    mass_sums = top_k_mass.cumsum(-1, dtype=torch.float64)
    mass_before = mass_sums - top_k_mass  # the mass of everything more likely
    is_kept = (mass_before < top_p[:, None] * mass_sums[:, -1:]) | (top_p[:, None] >= 1)
    is_kept &= sorted_weights >= min_p[:, None] * sorted_weights[:, :1]
    return torch.zeros_like(weights).scatter_(-1, token_order, torch.where(is_kept, top_k_mass, 0.0))


def draw_tokens(
    weights: torch.Tensor, uniform: torch.Tensor, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first token at which the cumulative sum of the weights [M, V] exceeds uniform [M] times their total,
    and that total, both [M, 1]; never a token of weight zero. With `rows` [M], draw i uses the weights `rows[i]`."""
    # Choose the block of tokens first, then the token in it. This takes one pass over the vocabulary and no long sum in
    # float32, in which a token of probability 3e-8 would be lost.
    if padding := -weights.shape[-1] % BLOCK_TOKENS:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.unflatten(-1, (-1, BLOCK_TOKENS))
    block_sums = blocks.sum(-1).double()  # [M, blocks]
    block_ends = block_sums.cumsum(-1)
    if rows is not None:
        block_sums, block_ends = block_sums[rows], block_ends[rows]
    total_mass = block_ends[:, -1:]
    cutoff = uniform[:, None] * total_mass
    last_block = blocks.shape[-2] - 1
    block = torch.searchsorted(block_ends, cutoff, right=True).clamp_(max=last_block)  # [M, 1]; NaN is last
    block_sum = block_sums.gather(1, block)
    # Relative position in the block; below 1 despite rounding, so that the point is before the block's end.
    block_share = ((cutoff - block_ends.gather(1, block)) / block_sum + 1).clamp_(0, BELOW_ONE)
    if rows is None:
        block_values = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK_TOKENS))[:, 0]
    else:
        block_values = blocks[rows, block[:, 0]]
    token_ends = block_values.cumsum(-1, dtype=torch.float64)
    token_index = (token_ends <= block_share * token_ends[:, -1:]).sum(-1, keepdim=True)
    return block * BLOCK_TOKENS + token_index, total_mass


def pick(
    logits: torch.Tensor,  # [M, V]
    uniform: torch.Tensor,  # [M] float64
    temperature: torch.Tensor | None = None,  # [M], 0 is greedy; None: all are 1
    filters: Sequence[torch.Tensor] = (),  # top-p, top-k and min-p, [M] each
    rows: torch.Tensor | None = None,  # [M]: the row of logits for each draw; None: row i for draw i
) -> torch.Tensor:
    """Return tokens and their log-probs as one float64 tensor [2, M], for one copy to the host. Log-probs are those of
    the full softmax at the row's temperature (at temperature 1 for greedy rows)."""
    logits = logits.float()
    if temperature is not None:
        logits, rows = logits if rows is None else logits[rows], None
        logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None].float()
    shifted = logits - logits.amax(-1, keepdim=True)
    weights = shifted.exp()
    tokens, total_mass = draw_tokens(weights, uniform, rows)
    if filters:
        tokens, _ = draw_tokens(apply_filters(weights, *filters), uniform)
    if temperature is not None:
        tokens = torch.where(temperature[:, None] > 0, tokens, logits.argmax(-1, keepdim=True))
    # NaN logits can give a token out of range; the caller detects them by the log-prob.
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    token_logprobs = shifted.gather(-1, tokens) if rows is None else shifted[rows, tokens[:, 0]][:, None]
    logprobs = token_logprobs - total_mass.log()
    return torch.cat((tokens.double(), logprobs), 1).T


def unpack_draws(samples: torch.Tensor | None, is_used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens, logprobs = np.zeros((2, len(is_used))) if samples is None else samples.cpu().numpy()
    return tokens.astype(np.int64), logprobs


def require_finite(logprobs: np.ndarray) -> np.ndarray:
    if not np.isfinite(logprobs).all():
        raise FloatingPointError("the model returned NaN or infinite logits, so no token can be sampled")
    return logprobs
