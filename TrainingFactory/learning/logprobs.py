"""Token log-probs without materialising all logits: the head runs only at trained positions, in chunks, and the
backward pass recomputes the logits of each chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from TrainingFactory.learning.tree.layers import compile_once

CHUNK_ELEMENTS = 2**24  # logits of one chunk: 64 MiB in float32
# Larger chunks on a GPU, because every chunk reads all of the head's weights and writes their whole gradient.
GPU_CHUNK_FACTOR = 8


class _ChunkLogprobs(torch.autograd.Function):
    """Logits [C, V] -> log-probs of the targets [C] and entropies [C], with a manual backward, because autograd would
    keep more [C, V] tensors. Gradients by logits / temperature: one-hot - p of a log-prob, -p (log p + H) of an
    entropy."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target_ids: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled_logits = logits.float() if temperature == 1 else logits.float() / temperature
        logprobs = scaled_logits.log_softmax(-1)
        target_logprobs = logprobs.gather(-1, target_ids[:, None])[:, 0]
        probabilities = logprobs.exp()
        entropy = -logprobs.mul_(probabilities).sum(-1)
        ctx.save_for_backward(probabilities, target_ids, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)  # most losses have no use for the entropy
        return target_logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        probabilities, target, entropy = ctx.saved_tensors
        if grads[0] is None:
            gradient = torch.zeros_like(probabilities)
        else:
            logprob_grad = grads[0][:, None] / ctx.temperature  # [C, 1]
            gradient = (probabilities * -logprob_grad).scatter_add_(1, target[:, None], logprob_grad)
        if grads[1] is not None:
            logprobs = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
            gradient -= probabilities * (logprobs + entropy[:, None]) * (grads[1][:, None] / ctx.temperature)
        return gradient.to(ctx.dtype), None, None


def compute_target_logprobs(
    logits: torch.Tensor, target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probs of the targets, entropies and log-sum-exp, each [1, C, 1], of logits [1, C, V]."""
    scaled_logits = logits.float() / temperature
    logsumexp = scaled_logits.logsumexp(-1, keepdim=True)
    logprobs = scaled_logits - logsumexp
    return logprobs.gather(-1, target), -(logprobs.exp() * logprobs).sum(-1, keepdim=True), logsumexp


def compute_logits_grad(
    logits: torch.Tensor, target: torch.Tensor, logsumexp: torch.Tensor, entropy: torch.Tensor,
    logprob_grad: torch.Tensor, entropy_grad: torch.Tensor | None, temperature: float, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    logprobs = logits.float() / temperature - logsumexp
    probabilities, is_target = logprobs.exp(), torch.arange(logits.shape[-1], device=logits.device) == target
    gradient = (is_target.float() - probabilities) * logprob_grad
    if entropy_grad is not None:
        gradient = gradient - probabilities * (logprobs + entropy) * entropy_grad
    return (gradient / temperature).to(dtype)


def compute_float32_logits(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits [C, V] in float32, because bfloat16 numbers near a logit of 20 are 0.125 apart."""
    if states.dtype == torch.float32:
        return states @ weight.t()
    return torch.mm(states, weight.t(), out_dtype=torch.float32)  # CUDA only


class _PlainHeadLogprobs(torch.autograd.Function):
    """Log-probs and entropies from a head that is a single matrix, on a GPU, where passes over [C, V] dominate the
    cost. Forward and backward write the logits once each; the backward stores only their gradient, in the model's
    dtype."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, source: torch.Tensor, target: torch.Tensor,
        temperature: float, chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        chunks = []
        for positions, targets in zip(source.split(chunk_size), target.split(chunk_size), strict=True):
            logits = compute_float32_logits(hidden.index_select(0, positions), weight)
            chunks.append(
                compile_once(compute_target_logprobs)(logits[None], targets[None, :, None], temperature)
            )
        token_logprobs, entropy, logsumexp = (
            torch.cat(outputs, 1) for outputs in zip(*chunks, strict=True)
        )  # [1, M, 1]
        ctx.save_for_backward(hidden, weight, source, target, logsumexp, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)  # most losses have no use for the entropy
        return token_logprobs[0, :, 0], entropy[0, :, 0]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Any
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, source, target, logsumexp, entropy = ctx.saved_tensors
        logprob_grad, entropy_grad = (None if grad is None else grad[None, :, None] for grad in grads)
        logprob_grad = torch.zeros_like(logsumexp) if logprob_grad is None else logprob_grad
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(source), ctx.chunk_size):
            chunk = slice(start, start + ctx.chunk_size)
            states = hidden.index_select(0, source[chunk])
            logits_grad = compile_once(compute_logits_grad)(
                compute_float32_logits(states, weight)[None], target[None, chunk, None], logsumexp[:, chunk],
                entropy[:, chunk], logprob_grad[:, chunk], None if entropy_grad is None else entropy_grad[:, chunk],
                ctx.temperature, states.dtype,
            )[0]  # fmt: skip
            hidden_grad.index_add_(0, source[chunk], logits_grad @ weight)
            if weight_grad is not None:
                weight_grad.addmm_(logits_grad.t(), states)
        return hidden_grad, weight_grad, None, None, None, None


def _is_plain(output_head: Any, states: torch.Tensor) -> bool:
    """Return whether the head is a bias-free linear layer on a GPU with the dtype of the states."""
    is_plain_linear = states.is_cuda and type(output_head) is torch.nn.Linear and output_head.bias is None
    return is_plain_linear and states.dtype == output_head.weight.dtype


def compute_token_logprobs(
    hidden: torch.Tensor,  # [N, D]
    head: Callable[[torch.Tensor], torch.Tensor],  # [C, D] -> [C, V]
    source: torch.Tensor,  # [M] positions in `hidden` that predict
    target: torch.Tensor,  # [M] token ids that they predict
    vocab_size: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs [M] and entropies [M], both at the given temperature."""
    chunk_size = max(1, CHUNK_ELEMENTS * (GPU_CHUNK_FACTOR if hidden.is_cuda else 1) // vocab_size)
    if _is_plain(head, hidden):
        weight: Any = head.weight  # pyright: ignore[reportFunctionMemberAccess]
        return _PlainHeadLogprobs.apply(hidden, weight, source, target, temperature, chunk_size)  # pyright: ignore
    is_recomputed = len(source) > chunk_size and torch.is_grad_enabled()

    def compute_chunk(states: torch.Tensor, targets: torch.Tensor) -> Any:
        return _ChunkLogprobs.apply(head(states), targets, temperature)

    outputs = []
    for positions, targets in zip(source.split(chunk_size), target.split(chunk_size), strict=True):
        states = hidden.index_select(0, positions)
        compute = partial(checkpoint, compute_chunk, use_reentrant=False) if is_recomputed else compute_chunk
        outputs.append(compute(states, targets))
    logprobs, entropies = zip(*outputs, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
