"""Run the layers of models that are built like Llama with their small operations fused, on a GPU. Norms, rotation and
gate only move memory; transformers has some forty kernels for them, torch.compile makes one of each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import silu
from transformers import PreTrainedModel

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
Attend = Callable[..., tuple[torch.Tensor, None]]
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
    """Do what a decoder layer does. Its projections are called as they are: they may be LoRA's."""
    attention, mlp = layer.self_attn, layer.mlp
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    normed = make(norm)(hidden_states, first.weight, first.variance_epsilon)
    turned = []
    for name in ("q", "k"):
        own = getattr(attention, f"{name}_norm", None)
        rest = (None, 0.0) if own is None else (own.weight, own.variance_epsilon)
        turned.append(make(rotate)(getattr(attention, f"{name}_proj")(normed), *position_embeddings, *rest))
    value = attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    mixed, _ = attend(attention, *turned, value, None, attention.scaling, tfactory_tree=tfactory_tree)
    states, normed = make(add_norm)(
        hidden_states, attention.o_proj(mixed.flatten(2)), second.weight, second.variance_epsilon
    )
    return states + mlp.down_proj(make(gate)(mlp.gate_proj(normed), mlp.up_proj(normed)))
