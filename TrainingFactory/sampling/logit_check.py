"""The check at load that the engine computes the logits of its model.

The logits of a few tokens are compared with those of the model's own attention: the median over tokens, because the
16-bit logits of a trained model depend much on the order of summation at some of them. In some models (Gemma 3 after
SFT) rounding moves the logits of so many tokens that one sequence says little. Then more sequences are compared, with
the logits of a float32 copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from TrainingFactory.sampling.cache.view import make_error

CHUNK_LENGTH, NUM_STEPS = 8, 7  # tokens of a sequence: those of one chunk, and those of one step each
NUM_SEQUENCES = 8


def check_logits(
    model: PreTrainedModel, compute_logits: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """Raise ValueError if the engine's logits are far from those of `model`, relative to their spread.
    `compute_logits` returns the engine's for rows of token ids; `dtype` is that of the cache."""
    embeddings: Any = model.get_input_embeddings()
    starts = 1000 * torch.arange(1, NUM_SEQUENCES + 1)[:, None]  # the first ids are special tokens
    sequences = (starts + torch.arange(CHUNK_LENGTH + NUM_STEPS)) % embeddings.num_embeddings
    sequences = sequences.to(embeddings.weight.device)
    error = _measure_error(compute_logits(sequences[:1]), _compute_model_logits(model, sequences[:1]))
    if error < (0.01 if dtype == torch.float32 else 0.1):
        return
    exact_logits = None if dtype == torch.float32 else _compute_float32_logits(model, sequences)
    if exact_logits is not None:
        model_error = _measure_error(_compute_model_logits(model, sequences), exact_logits)
        if _measure_error(compute_logits(sequences), exact_logits) < min(2 * model_error, 0.5):
            return
    problem = f"its logits through the slot cache are off by {error:.1%} of their spread"
    raise make_error(model.config.model_type, problem)


def _compute_model_logits(model: PreTrainedModel, sequences: torch.Tensor) -> torch.Tensor:
    """Return the float32 logits of sequences, one after the other."""
    return torch.cat([model(input_ids=ids[None], use_cache=False).logits.float() for ids in sequences])


def _compute_float32_logits(model: PreTrainedModel, sequences: torch.Tensor) -> torch.Tensor | None:
    """Return the logits of a float32 copy of the model, or None if its weights are quantized or the copy does not fit
    into memory."""
    if getattr(model, "is_quantized", False):  # third-party object
        return None
    try:
        return _compute_model_logits(copy.deepcopy(model).float(), sequences)
    except torch.OutOfMemoryError:
        return None


def _measure_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far logits are off, relative to their spread: the median over the tokens of chunks or over those of
    steps, whichever is larger."""
    errors = (logits - expected).abs().mean(2) / expected.std(2).clamp(min=1e-6)
    return max(float(part.median()) for part in errors.split([CHUNK_LENGTH, NUM_STEPS], dim=1))
