"""Run the layers of models that are built like Llama with the GPU's kernels, over the model's own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from TrainingFactory.sampling import kernels
from TrainingFactory.sampling.slots import Shape, StepContext
from TrainingFactory.sampling.view import join

MODELS = {"llama", "mistral", "qwen2", "qwen3"}


class FusedLayer(nn.Module):
    """Does what a decoder layer does in nine kernels. Projections that are not plain, LoRA's, are called."""

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
        normed, states = kernels.norm(
            attention.o_proj(mixed.flatten(1)), self.post_attention_layernorm, states
        )
        inner, down = kernels.gate(*_products(normed, mlp.gate_proj, mlp.up_proj)), mlp.down_proj
        if type(down) is nn.Linear and down.bias is None:
            return states.addmm_(inner, down.weight.t())[None]
        return (states + down(inner))[None]


def _products(states: torch.Tensor, *layers: Any) -> Sequence[torch.Tensor]:
    """Return what the layers make of the states [N, E]: in one product, where they are plain."""
    weight = join(layers)
    if weight is None:
        return [layer(states) for layer in layers]
    return torch.mm(states, weight.t()).split([layer.out_features for layer in layers], 1)


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
