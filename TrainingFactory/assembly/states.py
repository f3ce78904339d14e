"""Sizes of the states of recurrent layers, from a text config: the doctor has no model to probe."""

from __future__ import annotations

from typing import Any

ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
STATE_TYPES = {"linear_attention", "hybrid", "conv"}
FLOAT32 = 4  # bytes: recurrent states have this precision in every model


def _types(shape: Any) -> list[str]:
    return [str(kind) for kind in getattr(shape, "layer_types", None) or ()]  # foreign object


def attention_layers(shape: Any) -> int:
    """Return the number of layers with keys and values."""
    types = _types(shape)
    return sum(kind in ATTENTION_TYPES for kind in types) if types else shape.num_hidden_layers


def row_bytes(shape: Any, size: int) -> int:
    """Return the bytes of one sequence's states in all recurrent layers; convolutions have `size` bytes a number."""
    layers = sum(kind in STATE_TYPES for kind in _types(shape))
    if not layers:
        return 0
    channels, kernel, recurrent, recurrent_size = _layer(shape, size)
    return layers * (channels * kernel * size + recurrent * recurrent_size)


def _layer(shape: Any, size: int) -> tuple[int, int, int, int]:
    """Return the channels and kernel size of a layer's convolution, and size and bytes per number of its state."""

    def get(*names: str) -> int:
        return next((int(value) for name in names if (value := getattr(shape, name, None)) is not None), 0)

    if heads := get("linear_num_value_heads"):  # gated delta rule
        key, value, key_heads = (
            get(name) for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads")
        )
        channels = 2 * key_heads * key + heads * value
        return channels, get("linear_conv_kernel_dim"), heads * key * value, FLOAT32
    if heads := get("linear_num_heads"):  # Kimi's delta attention
        dim = get("linear_head_dim")
        return 3 * heads * dim, get("linear_conv_kernel_dim"), heads * dim * dim, FLOAT32
    if heads := get("mamba_n_heads", "mamba_num_heads"):  # Mamba-2
        inner, states = heads * get("mamba_d_head", "mamba_head_dim"), get("mamba_d_state", "ssm_state_size")
        channels = inner + 2 * get("mamba_n_groups", "n_groups") * states
        return channels, get("mamba_d_conv", "conv_kernel"), inner * states, FLOAT32
    if kernel := get("conv_L_cache"):
        return shape.hidden_size, kernel, 0, size
    head = get("head_dim") or shape.hidden_size // shape.num_attention_heads  # lightning attention
    return 0, 0, shape.num_attention_heads * head * head, size
