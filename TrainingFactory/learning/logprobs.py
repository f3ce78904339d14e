"""Log-probs of given tokens. The head runs only on the positions that are trained, in chunks, and each chunk's
logits are made again in the backward pass: full logits of a long batch never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
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
    slope: torch.Tensor, bend: torch.Tensor | None, temperature: float, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    logs = logits.float() / temperature - total
    probabilities, hit = logs.exp(), torch.arange(logits.shape[-1], device=logits.device) == wanted
    found = (hit.float() - probabilities) * slope
    if bend is not None:
        found = found - probabilities * (logs + entropy) * bend
    return (found / temperature).to(dtype)


def wide_product(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits [C, V] in float32. In 16 bits those of 20 would have steps of 0.125."""
    if states.dtype == torch.float32:
        return states @ weight.t()
    return torch.mm(states, weight.t(), out_dtype=torch.float32)  # on a GPU alone


class _PlainHead(torch.autograd.Function):
    """Does all chunks of a head that is one matrix, on a GPU, where passes over [C, V] are what it costs: logits are
    written once each way, and of the backward pass only their gradient, in the numbers of the model."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, source: torch.Tensor, target: torch.Tensor,
        temperature: float, size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        parts = []
        for places, wanted in zip(source.split(size), target.split(size), strict=True):
            logits = wide_product(hidden.index_select(0, places), weight)
            parts.append(compiled(picked)(logits[None], wanted[None, :, None], temperature))
        chosen, entropy, total = (torch.cat(each, 1) for each in zip(*parts, strict=True))  # [1, M, 1]
        ctx.save_for_backward(hidden, weight, source, target, total, entropy)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)  # most losses have no use for the entropy
        return chosen[0, :, 0], entropy[0, :, 0]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Any
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, source, target, total, entropy = ctx.saved_tensors
        slope, bend = (None if each is None else each[None, :, None] for each in gradients)
        slope = torch.zeros_like(total) if slope is None else slope
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(source), ctx.size):
            part = slice(start, start + ctx.size)
            rows = hidden.index_select(0, source[part])
            found = compiled(picked_gradient)(
                wide_product(rows, weight)[None], target[None, part, None], total[:, part], entropy[:, part],
                slope[:, part], None if bend is None else bend[:, part], ctx.temperature, rows.dtype,
            )[0]  # fmt: skip
            of_hidden.index_add_(0, source[part], found @ weight)
            if of_weight is not None:
                of_weight.addmm_(found.t(), rows)
        return of_hidden, of_weight, None, None, None, None


def _is_plain(head: Any, states: torch.Tensor) -> bool:
    """Tell whether the head is one matrix, on a GPU, in the numbers of the states."""
    plain = states.is_cuda and type(head) is torch.nn.Linear and head.bias is None
    return plain and states.dtype == head.weight.dtype


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
    if _is_plain(head, hidden):
        weight: Any = head.weight  # pyright: ignore[reportFunctionMemberAccess]
        return _PlainHead.apply(hidden, weight, source, target, temperature, size)  # pyright: ignore
    several = len(source) > size and torch.is_grad_enabled()

    def chunk(rows: torch.Tensor, wanted: torch.Tensor) -> Any:
        return _Pick.apply(head(rows), wanted, temperature)

    parts = []
    for places, wanted in zip(source.split(size), target.split(size), strict=True):
        rows = hidden.index_select(0, places)
        parts.append(checkpoint(chunk, rows, wanted, use_reentrant=False) if several else chunk(rows, wanted))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
