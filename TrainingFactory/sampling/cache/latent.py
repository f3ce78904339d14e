"""Multi-head latent attention (DeepSeek V3) over a cache of compressed keys and values.

The model's own attention expands the compressed vector of every cached token to keys and values of all heads. Here the
expansion of the keys is applied to the queries instead, and that of the values to the attention output, so that the
cache holds one vector per token: its compressed part (rank r) and the rotated part that all heads share.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


class LatentAttention:
    """Mixin for an attention module whose `expand_kv` makes keys and values from the compressed vectors."""

    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the compressed vectors [1, 1, N, r + rotated] as keys of one head, and [1, 1, N, r] as its values."""
        return torch.cat((kv_nope, k_rot), -1), kv_nope


@functools.cache
def _with_latent_cache(attention_class: type[nn.Module]) -> type[nn.Module]:
    return type(attention_class.__name__, (LatentAttention, attention_class), {})


def get_latent_class(module: nn.Module) -> type[nn.Module] | None:
    """Return a subclass of the module's class that caches compressed vectors; None if the module has no latent
    attention."""
    if hasattr(type(module), "expand_kv") and isinstance(getattr(module, "kv_b_proj", None), nn.Module):
        return _with_latent_cache(type(module))
    return None


def is_latent(module: nn.Module) -> bool:
    return isinstance(module, LatentAttention)


def _split_expansion(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices [H, key size, r] and [H, value size, r] that expand the compressed vectors."""
    layer = module.kv_b_proj
    if type(layer) is nn.Linear:
        weight = layer.weight
    else:  # adapters and quantized layers: the output for each unit vector
        states = module.kv_a_layernorm.weight
        weight = layer(torch.eye(module.kv_lora_rank, dtype=states.dtype, device=states.device)).t()
    head_weights = weight.unflatten(0, (module.num_heads, -1))
    return head_weights[:, : module.qk_nope_head_dim], head_weights[:, module.qk_nope_head_dim :]


def absorb_keys(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Apply the expansion of the keys to the queries: [1, H, N, key size + rotated] -> [1, H, N, r + rotated]"""
    weights, _ = _split_expansion(module)
    unrotated_query, rotated_query = query.split([weights.shape[1], query.shape[-1] - weights.shape[1]], -1)
    return torch.cat((unrotated_query[0] @ weights, rotated_query[0]), -1)[None]


def expand_values(module: Any, output: torch.Tensor) -> torch.Tensor:
    """Apply the expansion of the values to the attention output: [1, N, H, r] -> [1, N, H, value size]"""
    _, value_weights = _split_expansion(module)
    return (output[0].transpose(0, 1) @ value_weights.transpose(1, 2)).transpose(0, 1)[None]
