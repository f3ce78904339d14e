"""Fused decoder layers for Llama-like models on a GPU. Norms, rotary embeddings and gates are memory-bound;
transformers launches some forty kernels for them, torch.compile fuses each into one. Everything before attention is
one compiled function and everything after it another, because a call costs the host as much as several kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

Jit = Callable[[Callable[..., Any]], Callable[..., Any]]
Attend = Callable[..., tuple[torch.Tensor, None]]
Matrix = tuple[torch.Tensor, torch.Tensor | None]  # and its bias
SUPPORTED_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}


def rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    float_states = states.float()
    float_states = float_states * torch.rsqrt(float_states.square().mean(-1, keepdim=True) + epsilon)
    return weight * float_states.to(states.dtype)


def add_norm(
    states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual_sum = states + residual
    return residual_sum, rms_norm(residual_sum, weight, epsilon)


def rotate(
    states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Apply RMSNorm (if `weight` is given) and rotary embeddings. [1, N, H * d] -> [1, H, N, d]"""
    states = states.unflatten(-1, (-1, cos.shape[-1]))
    states = states if weight is None else rms_norm(states, weight, epsilon)
    first_half, second_half = states.chunk(2, -1)
    rotated = torch.cat((-second_half, first_half), -1)
    return (states * cos[:, :, None] + rotated * sin[:, :, None]).transpose(1, 2)


def apply_gate(gate_states: torch.Tensor, up_states: torch.Tensor) -> torch.Tensor:
    return silu(gate_states) * up_states


def project_qkv(
    states: torch.Tensor, weight: torch.Tensor, epsilon: float, cos: torch.Tensor, sin: torch.Tensor,
    query: Matrix, key: Matrix, value: Matrix, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the queries, keys and values of attention, each [1, heads, N, d]."""
    normed = rms_norm(states, weight, epsilon)
    q, k = linear(normed, *query), linear(normed, *key)
    v = linear(normed, *value).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
    return rotate(q, cos, sin, query_norm, epsilon), rotate(k, cos, sin, key_norm, epsilon), v


def compute_layer_output(
    states: torch.Tensor, attention_output: torch.Tensor, weight: torch.Tensor, epsilon: float,
    out_proj: Matrix, gate_proj: Matrix, up_proj: Matrix, down_proj: Matrix,
) -> torch.Tensor:  # fmt: skip
    """Return the layer's output from its input `states` and the attention output `attention_output`."""
    states, normed = add_norm(states, linear(attention_output, *out_proj), weight, epsilon)
    return states + linear(apply_gate(linear(normed, *gate_proj), linear(normed, *up_proj)), *down_proj)


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with torch.compile. Shapes are static except the number of tokens, which is dimension 1 of 3-D
    tensors."""
    compiled_function = torch.compile(function)

    def call_compiled(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.dim() == 3:
                torch._dynamo.maybe_mark_dynamic(arg, 1)
        return compiled_function(*args)

    return call_compiled


@contextlib.contextmanager
def use_fused_layers(model: PreTrainedModel, attend: Attend, jit: Jit = compile_once) -> Iterator[None]:
    """Replace the forward of each supported decoder layer by the fused one inside the block. Layers that other code has
    patched are skipped."""
    config = model.config.get_text_config()
    is_supported = config.model_type in SUPPORTED_MODEL_TYPES and config.hidden_act == "silu"
    base_model: Any = model.base_model
    # Inside a vision-language model.
    text_model = getattr(base_model, "language_model", getattr(base_model, "text_model", base_model))
    layers: list[Any] = list(filter(_is_unpatched, text_model.layers)) if is_supported else []
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, attend, jit)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_unpatched(layer: torch.nn.Module) -> bool:
    has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in layer.children())
    return not has_hooks and not any("forward" in module.__dict__ for module in (layer, *layer.children()))


def _forward(
    layer: Any,
    attend: Attend,
    jit: Jit,
    hidden_states: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    tfactory_tree: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute a decoder layer with fused operations."""
    attention, mlp, post_norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    matrices = _get_matrices(layer)
    attention_inputs = _prepare_attention(layer, jit, matrices, hidden_states, *position_embeddings)
    attention_output, _ = attend(
        attention,
        *attention_inputs,
        None,
        attention.scaling,
        tfactory_tree=tfactory_tree,
        sliding_window=_get_window(attention),
    )
    attention_output = attention_output.flatten(2)
    norm_args = post_norm.weight, post_norm.variance_epsilon
    if matrices is not None:
        return jit(compute_layer_output)(hidden_states, attention_output, *norm_args, *matrices[3:])
    states, normed = jit(add_norm)(hidden_states, attention.o_proj(attention_output), *norm_args)
    return states + mlp.down_proj(jit(apply_gate)(mlp.gate_proj(normed), mlp.up_proj(normed)))


def _get_window(attention: Any) -> int | None:
    """Return the layer's sliding window. Mistral stores one window for all layers in its config, Qwen one in each
    layer."""
    return (
        attention.config.sliding_window
        if attention.config.model_type == "mistral"
        else getattr(attention, "sliding_window", None)
    )


def _prepare_attention(
    layer: Any, jit: Jit, matrices: list[Matrix] | None, states: torch.Tensor, *cos_sin: torch.Tensor
) -> Sequence[torch.Tensor]:
    attention, pre_norm = layer.self_attn, layer.input_layernorm
    epsilon = pre_norm.variance_epsilon
    qk_norms = [getattr(attention, f"{name}_norm", None) for name in ("q", "k")]
    weights = [None if qk_norm is None else qk_norm.weight for qk_norm in qk_norms]
    if matrices is not None:
        return jit(project_qkv)(states, pre_norm.weight, epsilon, *cos_sin, *matrices[:3], *weights)
    normed = jit(rms_norm)(states, pre_norm.weight, epsilon)
    projections = zip((attention.q_proj, attention.k_proj), weights, strict=True)
    rotated = [jit(rotate)(project(normed), *cos_sin, weight, epsilon) for project, weight in projections]
    return *rotated, attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def _get_matrices(layer: Any) -> list[Matrix] | None:
    """Return the weights of the layer's projections. Return None if the projections must be called as modules, as LoRA
    layers and sharded layers must."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    projections += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if isinstance(layer, FSDPModule) or any(type(module) is not torch.nn.Linear for module in projections):
        return None
    return [(module.weight, module.bias) for module in projections]
