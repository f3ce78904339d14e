"""Log-probs of given tokens. The head runs only on the positions that are trained, in chunks, and each chunk's
logits are made again in the backward pass: full logits of a long batch never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from TrainingFactory.learning.tree.layers import compiled

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


def picked(
    logits: torch.Tensor, wanted: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropies and logarithms of the sums [1, C, 1], of logits [1, C, V]."""
    scaled = logits.float() / temperature
    total = scaled.logsumexp(-1, keepdim=True)
    logs = scaled - total
    return logs.gather(-1, wanted), -(logs.exp() * logs).sum(-1, keepdim=True), total


def picked_gradient(
    logits: torch.Tensor, wanted: torch.Tensor, total: torch.Tensor, entropy: torch.Tensor,
    slope: torch.Tensor, bend: torch.Tensor | None, temperature: float,
) -> torch.Tensor:  # fmt: skip
    logs = logits.float() / temperature - total
    probabilities, hit = logs.exp(), torch.arange(logits.shape[-1], device=logits.device) == wanted
    found = (hit.float() - probabilities) * slope
    if bend is not None:
        found = found - probabilities * (logs + entropy) * bend
    return (found / temperature).to(logits.dtype)


class _FusedPick(torch.autograd.Function):
    """Does what `_Pick` does on a GPU, where passes over [C, V] are what it costs: three there, one back."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, wanted: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, entropy, total = compiled(picked)(logits[None], wanted[None, :, None], temperature)
        ctx.save_for_backward(logits, wanted, total, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen[0, :, 0], entropy[0, :, 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        logits, wanted, total, entropy = ctx.saved_tensors
        slope, bend = (None if each is None else each[None, :, None] for each in gradients)
        slope = torch.zeros_like(total) if slope is None else slope
        given = (logits[None], wanted[None, :, None], total, entropy, slope, bend, ctx.temperature)
        return compiled(picked_gradient)(*given)[0], None, None


def wide_product(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(states, weight.t(), out_dtype=torch.float32)  # a GPU's alone


class _WideLinear(torch.autograd.Function):
    """Gives the logits of 16-bit states and weights in float32. Rounded to 16 bits, of which a logit of 20 has steps of
    0.125, they would be the larger part of what log-probs are off by."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        return wide_product(states, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor]:
        states, weight = ctx.saved_tensors
        slope = gradients[0].to(states.dtype)
        return slope @ weight, slope.t() @ states


def _widens(head: Any, states: torch.Tensor) -> bool:
    """Tell whether the head is a plain product of 16-bit numbers on a GPU."""
    plain = type(head) is torch.nn.Linear and head.bias is None
    return plain and states.is_cuda and states.dtype == head.weight.dtype != torch.float32


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
    pick = _FusedPick if hidden.is_cuda else _Pick
    wide: Any = head if _widens(head, hidden) else None

    def chunk(rows: torch.Tensor, wanted: torch.Tensor) -> Any:
        logits = head(rows) if wide is None else _WideLinear.apply(rows, wide.weight)
        return pick.apply(logits, wanted, temperature)

    parts = []
    for places, wanted in zip(source.split(size), target.split(size), strict=True):
        rows = hidden.index_select(0, places)
        parts.append(checkpoint(chunk, rows, wanted, use_reentrant=False) if several else chunk(rows, wanted))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
