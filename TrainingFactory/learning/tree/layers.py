"""Run the layers of models that are built like Llama with their small operations fused, on a GPU. Norms, rotation and
gate only move memory; transformers has some forty kernels for them, torch.compile makes one of each. What comes before
attention is one compiled function, and what comes after it another: each call costs the host as much as several kernels
do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
Attend = Callable[..., tuple[torch.Tensor, None]]
Matrix = tuple[torch.Tensor, torch.Tensor | None]  # and its bias
MODELS = {"llama", "mistral", "qwen2", "qwen3"}


def norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    exact = states.float()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + epsilon)
    return weight * exact.to(states.dtype)


def add_norm(
    states: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = states + more
    return total, norm(total, weight, epsilon)


def rotate(
    states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Norm, where there is a weight for it, and rotate. [1, N, H * d] -> [1, H, N, d]"""
    states = states.unflatten(-1, (-1, cos.shape[-1]))
    states = states if weight is None else norm(states, weight, epsilon)
    first, second = states.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (states * cos[:, :, None] + turned * sin[:, :, None]).transpose(1, 2)


def gate(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return silu(first) * second


def before(
    states: torch.Tensor, weight: torch.Tensor, epsilon: float, cos: torch.Tensor, sin: torch.Tensor,
    query: Matrix, key: Matrix, value: Matrix, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return what attention takes. Three of [1, heads, N, d]"""
    normed = norm(states, weight, epsilon)
    q, k = linear(normed, *query), linear(normed, *key)
    v = linear(normed, *value).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
    return rotate(q, cos, sin, query_norm, epsilon), rotate(k, cos, sin, key_norm, epsilon), v


def after(
    states: torch.Tensor, mixed: torch.Tensor, weight: torch.Tensor, epsilon: float,
    out: Matrix, first: Matrix, second: Matrix, down: Matrix,
) -> torch.Tensor:  # fmt: skip
    """Return what the layer makes of its states and of what attention has mixed."""
    states, normed = add_norm(states, linear(mixed, *out), weight, epsilon)
    return states + linear(gate(linear(normed, *first), linear(normed, *second)), *down)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for the sizes at hand but any number of tokens, which is the second size of tensors that have three."""
    fused = torch.compile(function)

    def call(*given: Any) -> Any:
        for each in given:
            if isinstance(each, torch.Tensor) and each.dim() == 3:
                torch._dynamo.maybe_mark_dynamic(each, 1)
        return fused(*given)

    return call


@contextlib.contextmanager
def fused(model: PreTrainedModel, attend: Attend, make: Make = compiled) -> Iterator[None]:
    """Let the layers of models that are known run fused, if nobody has changed their parts."""
    config = model.config.get_text_config()
    known = config.model_type in MODELS and config.hidden_act == "silu"
    known = known and not getattr(config, "sliding_window", None)  # foreign attribute, present or not
    layers: list[Any] = [each for each in model.base_model.layers if _plain(each)] if known else []  # pyright: ignore
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, attend, make)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _plain(layer: torch.nn.Module) -> bool:
    hooked = any(part._forward_hooks or part._forward_pre_hooks for part in layer.children())
    return not hooked and not any("forward" in part.__dict__ for part in (layer, *layer.children()))


def _forward(
    layer: Any,
    attend: Attend,
    make: Make,
    hidden_states: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    tfactory_tree: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Do what a decoder layer does."""
    attention, matrices = layer.self_attn, _matrices(layer)
    given = _before(layer, make, matrices, hidden_states, *position_embeddings)
    mixed, _ = attend(attention, *given, None, attention.scaling, tfactory_tree=tfactory_tree)
    mixed, mlp, second = mixed.flatten(2), layer.mlp, layer.post_attention_layernorm
    rest = second.weight, second.variance_epsilon
    if matrices is not None:
        return make(after)(hidden_states, mixed, *rest, *matrices[3:])
    states, normed = make(add_norm)(hidden_states, attention.o_proj(mixed), *rest)
    return states + mlp.down_proj(make(gate)(mlp.gate_proj(normed), mlp.up_proj(normed)))


def _before(
    layer: Any, make: Make, matrices: list[Matrix] | None, states: torch.Tensor, *turn: torch.Tensor
) -> Sequence[torch.Tensor]:
    attention, first = layer.self_attn, layer.input_layernorm
    norms = [getattr(attention, f"{name}_norm", None) for name in ("q", "k")]
    weights = [None if each is None else each.weight for each in norms]
    if matrices is not None:
        return make(before)(states, first.weight, first.variance_epsilon, *turn, *matrices[:3], *weights)
    normed = make(norm)(states, first.weight, first.variance_epsilon)
    pairs = zip((attention.q_proj, attention.k_proj), weights, strict=True)
    turned = [make(rotate)(project(normed), *turn, own, first.variance_epsilon) for project, own in pairs]
    return *turned, attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)


def _matrices(layer: Any) -> list[Matrix] | None:
    """Return the projections if they are plain and whole; LoRA's, and those of divided layers, are called instead."""
    attention, mlp = layer.self_attn, layer.mlp
    own = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    own += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    plain = all(type(each) is torch.nn.Linear for each in own) and not isinstance(layer, FSDPModule)
    return [(each.weight, each.bias) for each in own] if plain else None
