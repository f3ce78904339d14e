"""Gated delta layers (Qwen3.5) that decode one token per row: two Triton kernels update the cached states in place.

In torch, a step reads and writes the states several times, and copies those of the rows out of the cache and back. Here
a program reads the state of a head once and writes it once. The kernels round at the same places as transformers.

Legend: P rows, C channels and W width of the convolution, H heads of values, G heads of values per head of keys,
D size of keys, E size of values.
"""

# Triton is not installed beside the CPU build of torch; where it is, its types know neither constexpr nor num_warps.
# pyright: reportIndexIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from TrainingFactory.sampling.gpu.fused import project

PROGRAM_CHANNELS = 512  # of a program of the convolution


@triton.jit
def _convolve(
    x, weight, states, slots, out, first_slot, x_stride, C, W: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Append a row's inputs to its convolution state, and convolve."""
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row) if LISTED else first_slot + row
    in_bounds, tap = channel < C, tl.arange(0, W)
    offset = slot.to(tl.int64) * C * W + channel[:, None] * W + tap[None, :]
    inputs = tl.load(x + row * x_stride + channel, in_bounds, 0)
    old_inputs = tl.load(states + offset + 1, in_bounds[:, None] & (tap < W - 1)[None, :], 0)
    window = tl.where((tap < W - 1)[None, :], old_inputs, inputs[:, None].to(old_inputs.dtype))
    tl.debug_barrier()  # other threads still read what this one writes
    tl.store(states + offset, window, in_bounds[:, None])
    weights = tl.load(weight + channel[:, None] * W + tap[None, :], in_bounds[:, None], 0)
    total = tl.sum(window.to(tl.float32) * weights.to(tl.float32), 1).to(weights.dtype).to(tl.float32)
    tl.store(out + row * C + channel, (total * tl.sigmoid(total)).to(out.dtype.element_ty), in_bounds)


@triton.jit
def _normalize(x):
    return x * tl.rsqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def _update(
    qkv, z, b, a, decays, dt_bias, weight, states, slots, out, first_slot, epsilon, scale, z_stride, b_stride, a_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Update the state [D, E] of a row's head, query it, and norm and gate the result."""
    row, head, d, e = tl.program_id(0), tl.program_id(1), tl.arange(0, D), tl.arange(0, E)
    slot = tl.load(slots + row) if LISTED else first_slot + row
    channels: tl.constexpr = 2 * (H // G) * D + H * E
    row_pointer = qkv + row * channels
    query = _normalize(tl.load(row_pointer + head // G * D + d).to(tl.float32)) * scale
    key = _normalize(tl.load(row_pointer + (H // G + head // G) * D + d).to(tl.float32))
    value = tl.load(row_pointer + 2 * (H // G) * D + head * E + e)
    raw_rate = tl.load(b + row * b_stride + head)
    rate = tl.sigmoid(raw_rate.to(tl.float32)).to(raw_rate.dtype).to(tl.float32)
    time_step = tl.load(a + row * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    time_step = tl.where(time_step > 20.0, time_step, tl.log(1.0 + tl.exp(tl.minimum(time_step, 20.0))))
    decay = tl.exp(-tl.exp(tl.load(decays + head).to(tl.float32)) * time_step)
    offset = (slot.to(tl.int64) * H + head) * D * E + d[:, None] * E + e[None, :]
    state = tl.load(states + offset).to(tl.float32) * decay
    delta = (value.to(tl.float32) - tl.sum(state * key[:, None], 0)) * rate
    state += key[:, None] * delta[None, :]
    tl.store(states + offset, state.to(states.dtype.element_ty))
    output = tl.sum(state * query[:, None], 0).to(value.dtype).to(tl.float32)
    output = output * tl.rsqrt(tl.sum(output * output) / E + epsilon)
    output = (output.to(value.dtype) * tl.load(weight + e)).to(tl.float32)
    gate = tl.load(z + row * z_stride + head * E + e).to(tl.float32)
    tl.store(out + (row * H + head) * E + e, (output * gate * tl.sigmoid(gate)).to(out.dtype.element_ty))


def can_decode(layer: Any, conv: torch.Tensor | None, recurrent: torch.Tensor | None) -> bool:
    """Return whether the kernels compute this layer with states of these shapes."""
    if conv is None or recurrent is None or not hasattr(layer, "in_proj_qkv") or layer.activation != "silu":
        return False
    sizes = (layer.head_k_dim, layer.head_v_dim, conv.shape[2])
    are_powers_of_two = all(size & (size - 1) == 0 for size in sizes) and max(sizes) <= 128
    fits_layout = conv.shape[1] == layer.conv_dim and recurrent.shape[1:] == (layer.num_v_heads, *sizes[:2])
    return are_powers_of_two and fits_layout and layer.conv1d.bias is None


def decode(
    layer: Any, states: torch.Tensor, slots: slice | torch.Tensor, conv: torch.Tensor, recurrent: torch.Tensor
) -> torch.Tensor:
    """Return the layer's output [P, 1, N] for one token of each row [P, 1, N], and update the states of the slots."""
    tokens = states[:, 0]
    qkv, z, b, a = project(tokens, layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    num_rows, channels, is_listed = len(tokens), layer.conv_dim, not isinstance(slots, slice)
    first_slot = 0 if isinstance(slots, torch.Tensor) else slots.start
    convolved = qkv.new_empty(num_rows, channels)
    _convolve[(num_rows, triton.cdiv(channels, PROGRAM_CHANNELS))](
        qkv, layer.conv1d.weight, conv, slots if is_listed else None, convolved, first_slot, qkv.stride(0), channels,
        conv.shape[2], is_listed, PROGRAM_CHANNELS,
    )  # fmt: skip
    num_heads, key_size, value_size = recurrent.shape[1:]
    output = qkv.new_empty(num_rows, num_heads * value_size)
    _update[(num_rows, num_heads)](
        convolved, z, b, a, layer.A_log, layer.dt_bias, layer.norm.weight, recurrent, slots if is_listed else None,
        output, first_slot, layer.norm.variance_epsilon, key_size**-0.5, z.stride(0), b.stride(0), a.stride(0),
        num_heads, layer.num_v_heads // layer.num_k_heads, key_size, value_size, is_listed, num_warps=8,
    )  # fmt: skip
    return project(output, layer.out_proj)[0][:, None]
