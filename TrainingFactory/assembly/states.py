"""Sizes and costs of recurrent layers, computed from a text config because the doctor has no model to probe."""

from __future__ import annotations

from typing import Any, NamedTuple

ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
STATE_TYPES = {"linear_attention", "hybrid", "conv"}
FLOAT32 = 4  # bytes: recurrent states have this precision in every model
DELTA_CHUNK_TOKENS = 64  # tokens per chunk of the delta rule's kernels
CHUNK = 256  # the same of other recurrent layers, if the config does not set it


class RecurrentSizes(NamedTuple):
    """Sizes of a recurrent layer, and its FLOPs in addition to those of its weights."""

    channels: int = 0  # of the convolution
    kernel: int = 0
    state: int = 0  # numbers
    state_bytes: int = FLOAT32  # of a number
    flops: int = 0  # per token: matrix products with the state and within a chunk


def _list_layer_types(shape: Any) -> list[str]:
    return [str(kind) for kind in getattr(shape, "layer_types", None) or ()]  # foreign object


def count_kv_layers(shape: Any) -> int:
    """Return the number of layers with keys and values."""
    layer_types = _list_layer_types(shape)
    return sum(kind in ATTENTION_TYPES for kind in layer_types) if layer_types else shape.num_hidden_layers


def count_recurrent_layers(shape: Any) -> int:
    """Return the number of layers with a recurrent state."""
    return sum(kind in STATE_TYPES for kind in _list_layer_types(shape))


def get_row_bytes(shape: Any, itemsize: int) -> int:
    """Return the bytes of one sequence's states in all recurrent layers. A value of a convolution's state takes
    `itemsize` bytes."""
    if not (num_layers := count_recurrent_layers(shape)):
        return 0
    sizes = measure_recurrent_layer(shape, itemsize)
    return num_layers * (sizes.channels * sizes.kernel * itemsize + sizes.state * sizes.state_bytes)


def measure_recurrent_layer(shape: Any, itemsize: int) -> RecurrentSizes:
    """Return the sizes of a text config's recurrent layers, all of which are equal. A `shape` with an attribute
    `recurrent` holds them already."""
    if (sizes := getattr(shape, "recurrent", None)) is not None:  # foreign object
        return sizes

    def get(*keys: str) -> int:
        return next((int(value) for key in keys if (value := getattr(shape, key, None)) is not None), 0)

    if heads := get("linear_num_value_heads"):  # gated delta rule
        key, value, num_key_heads = (
            get(name) for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads")
        )
        channels = 2 * num_key_heads * key + heads * value
        flops = heads * _count_delta_flops(key, value)
        return RecurrentSizes(channels, get("linear_conv_kernel_dim"), heads * key * value, FLOAT32, flops)
    if heads := get("linear_num_heads"):  # Kimi's delta attention
        head_dim = get("linear_head_dim")
        flops = heads * _count_delta_flops(head_dim, head_dim)
        return RecurrentSizes(
            3 * heads * head_dim, get("linear_conv_kernel_dim"), heads * head_dim * head_dim, FLOAT32, flops
        )
    if heads := get("mamba_n_heads", "mamba_num_heads"):  # Mamba-2
        inner, states = heads * get("mamba_d_head", "mamba_head_dim"), get("mamba_d_state", "ssm_state_size")
        num_groups, chunk = get("mamba_n_groups", "n_groups"), get("mamba_chunk_size", "chunk_size") or CHUNK
        channels = inner + 2 * num_groups * states
        flops = 4 * inner * states + 2 * chunk * (num_groups * states + inner)
        return RecurrentSizes(channels, get("mamba_d_conv", "conv_kernel"), inner * states, FLOAT32, flops)
    if kernel := get("conv_L_cache"):
        return RecurrentSizes(shape.hidden_size, kernel)
    width = get("head_dim") or shape.hidden_size // shape.num_attention_heads  # lightning attention
    state = shape.num_attention_heads * width * width
    chunk = get("block_size") or CHUNK
    return RecurrentSizes(0, 0, state, itemsize, 4 * state + 4 * chunk * shape.num_attention_heads * width)


def _count_delta_flops(key_width: int, value_width: int) -> int:
    """Return the FLOPs per token of one head. With the state: its value for a key, its answer to a query, and its
    update. Within a chunk: products of keys with keys, of queries with keys and of the inverse with keys (all
    `key_width` wide); products of the inverse and of the attention with values."""
    return 6 * key_width * value_width + DELTA_CHUNK_TOKENS * (6 * key_width + 4 * value_width)
