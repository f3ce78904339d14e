"""Log-probs of given tokens. The head runs only on the positions that are trained, in chunks, and each chunk's
logits are made again in the backward pass: full logits of a long batch never exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**24  # logits of one chunk: 64 MiB in float32


def token_logprobs(
    hidden: torch.Tensor,  # [N, D]
    head: Callable[[torch.Tensor], torch.Tensor],  # [C, D] -> [C, V]
    source: torch.Tensor,  # [M] which outputs predict
    target: torch.Tensor,  # [M] the tokens they predict
    vocabulary: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [M] at the given temperature, and the entropy [M] there (without gradient)."""
    size = max(1, CHUNK_ELEMENTS // vocabulary)

    def chunk(rows: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(rows).float() / temperature
        total = logits.logsumexp(-1)
        with torch.no_grad():
            entropy = total - (logits * (logits - total[:, None]).exp()).sum(-1)
        return logits.gather(-1, wanted[:, None])[:, 0] - total, entropy

    parts = []
    for start in range(0, len(source), size):
        rows = hidden.index_select(0, source[start : start + size])
        wanted = target[start : start + size]
        several = len(source) > size and torch.is_grad_enabled()
        parts.append(checkpoint(chunk, rows, wanted, use_reentrant=False) if several else chunk(rows, wanted))
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
