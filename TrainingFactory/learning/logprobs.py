"""Log-probs of given tokens. The head runs only on the positions that are trained, in chunks, and each chunk's
logits are made again in the backward pass: full logits of a long batch never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**24  # logits of one chunk: 64 MiB in float32
# On a GPU small chunks waste time: each reads the head's weights and writes their gradient as a whole.
GPU_FACTOR = 8


class _Pick(torch.autograd.Function):
    """Logits [C, V] -> log-probs of the wanted tokens [C] and entropies [C]. Written out because autograd would keep
    [C, V] several times more. Gradients by logits / temperature: one-hot - p, and of an entropy -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, wanted: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits.float() if temperature == 1 else logits.float() / temperature
        every = scaled.log_softmax(-1)
        chosen = every.gather(-1, wanted[:, None])[:, 0]
        probabilities = every.exp()
        entropy = -every.mul_(probabilities).sum(-1)
        ctx.save_for_backward(probabilities, wanted, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)  # most losses have no use for the entropy
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        probabilities, wanted, entropy = ctx.saved_tensors
        if gradients[0] is None:
            found = torch.zeros_like(probabilities)
        else:
            slope = gradients[0][:, None] / ctx.temperature  # [C, 1]
            found = (probabilities * -slope).scatter_add_(1, wanted[:, None], slope)
        if gradients[1] is not None:
            logs = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
            found -= probabilities * (logs + entropy[:, None]) * (gradients[1][:, None] / ctx.temperature)
        return found.to(ctx.dtype), None, None


def token_logprobs(
    hidden: torch.Tensor,  # [N, D]
    head: Callable[[torch.Tensor], torch.Tensor],  # [C, D] -> [C, V]
    source: torch.Tensor,  # [M] which outputs predict
    target: torch.Tensor,  # [M] the tokens they predict
    vocabulary: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [M] and entropies [M], both at the given temperature."""
    size = max(1, CHUNK_ELEMENTS * (GPU_FACTOR if hidden.is_cuda else 1) // vocabulary)
    several = len(source) > size and torch.is_grad_enabled()

    def chunk(rows: torch.Tensor, wanted: torch.Tensor) -> Any:
        return _Pick.apply(head(rows), wanted, temperature)

    parts = []
    for places, wanted in zip(source.split(size), target.split(size), strict=True):
        rows = hidden.index_select(0, places)
        parts.append(checkpoint(chunk, rows, wanted, use_reentrant=False) if several else chunk(rows, wanted))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
