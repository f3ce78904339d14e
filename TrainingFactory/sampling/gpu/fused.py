"""Run the layers of models that are built like Llama with the GPU's kernels, over the model's own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from TrainingFactory.sampling.cache.slots import Shape, StepContext
from TrainingFactory.sampling.cache.view import join
from TrainingFactory.sampling.gpu import kernels

MODELS = {"llama", "mistral", "qwen2", "qwen3"}


class FusedLayer(nn.Module):
    """Does what a decoder layer does in nine kernels, and eleven more with LoRA. Other projections are called."""

    plain: Any  # the class whose place it takes

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        step: StepContext = kwargs["tfactory_step"]
        if step.attend is None:  # the probe
            return self.plain.forward(self, hidden_states, **kwargs)
        assert step.cache is not None and step.where is not None
        attention: Any = self.self_attn
        mlp: Any = self.mlp
        layer, states = step.cache.layers[attention.layer_idx], hidden_states[0]
        normed, _ = kernels.norm(states, self.input_layernorm)
        q, k, v = _products(normed, attention.q_proj, attention.k_proj, attention.v_proj)
        norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        kernels.rotate(q, k, v, kwargs["position_embeddings"], layer, step.where, norms)
        mixed = step.attend(q.unflatten(1, (-1, layer.keys.shape[3])), layer, step, attention.scaling)
        (mixed,) = _products(mixed.flatten(1), attention.o_proj)
        normed, states = kernels.norm(mixed, self.post_attention_layernorm, states)
        inner = kernels.gate(*_products(normed, mlp.gate_proj, mlp.up_proj))
        _products(inner, mlp.down_proj, onto=states)
        return states[None]


class Projection(NamedTuple):
    """Holds a layer and, where it is LoRA's, what is added to what it makes: the factors down and up, and a number."""

    layer: Any
    added: tuple[Any, Any, float] | None = None


def _opened(layer: Any) -> Projection:
    """Return what is in a layer of LoRA, if that is all that it does."""
    if type(layer) is not LoraLinear or layer.disable_adapters or layer.merged:
        return Projection(layer)
    name = layer.active_adapters[0]
    if len(layer.active_adapters) > 1 or name not in layer.lora_A or name in layer.lora_variant:
        return Projection(layer)
    down, up = layer.lora_A[name], layer.lora_B[name]
    if up.bias is not None or up.weight.dtype != layer.base_layer.weight.dtype:
        return Projection(layer)
    return Projection(layer.base_layer, (down, up, layer.scaling[name]))


def _products(states: torch.Tensor, *layers: Any, onto: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
    """Return what the layers make of the states [N, E], in one product where they are plain, and one more for adapters
    on them. What a single layer makes can be added `onto` a tensor."""
    opened = [_opened(layer) for layer in layers]
    downs = [each.added[0] for each in opened if each.added is not None]
    weight, narrow = join([each.layer for each in opened]), join(downs) if downs else None
    if weight is None or (downs and narrow is None):
        made = [layer(states) for layer in layers]
        return made if onto is None else [onto.add_(made[0])]
    whole = torch.mm(states, weight.t()) if onto is None else onto.addmm_(states, weight.t())
    made = whole.split([each.layer.out_features for each in opened], 1)
    if narrow is not None:
        low = iter(torch.mm(states, narrow.t()).split([down.out_features for down in downs], 1))
        for part, (_, added) in zip(made, opened, strict=True):
            if added is not None:
                part.addmm_(next(low), added[1].weight.t(), alpha=added[2])
    return made


class WideHead(nn.Linear):
    """Gives the logits of 16-bit states in float32, as the learner takes them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.mm(input[0], self.weight.t(), out_dtype=torch.float32)[None]


def widen(head: Any) -> None:
    """Make a plain output layer of 16-bit weights on a GPU give float32."""
    plain = type(head) is nn.Linear and head.bias is None
    if plain and head.weight.is_cuda and head.weight.dtype != torch.float32:
        head.__class__ = WideHead


def fused_kind(module: nn.Module) -> type[nn.Module] | None:
    """Return what takes the module's place, if it is a layer and nobody has changed how its parts are called."""
    if not type(module).__name__.endswith("DecoderLayer"):
        return None
    parts: list[Any] = [module, *module.children()]
    changed = any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__ for part in parts
    )
    silu = type(module.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")  # pyright: ignore
    return FusedLayer if silu and not changed else None


def can_attend(shapes: list[Shape]) -> bool:
    """Tell whether the attention kernel takes these layers."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    sizes = all(shape.key_size == shape.value_size in (16, 32, 64, 128, 256) for shape in shapes)
    return sizes and all(shape.dtype in kinds for shape in shapes)
