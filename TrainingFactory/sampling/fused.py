"""Run the layers of models that are built like Llama with the GPU's kernels, over the model's own modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from TrainingFactory.sampling import kernels
from TrainingFactory.sampling.slots import Shape, StepContext

MODELS = {"llama", "mistral", "qwen2", "qwen3"}
NORMS, LINEARS = {"q_norm", "k_norm"}, {"q_proj", "k_proj", "v_proj", "o_proj"}


class FusedNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return kernels.norm(states.flatten(0, -2), self)[0].view_as(states)


class FusedLayer(nn.Module):
    """Does what a decoder layer does in a dozen kernels. The projections are called as they are: they may be LoRA's."""

    plain: Any  # the class whose place it takes

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        step: StepContext = kwargs["tfactory_step"]
        if step.attend is None:
            return self.plain.forward(self, hidden_states, **kwargs)
        assert step.cache is not None and step.where is not None
        attention: Any = self.self_attn
        mlp: Any = self.mlp
        layer, states = step.cache.layers[attention.layer_idx], hidden_states[0]
        normed, _ = kernels.norm(states, self.input_layernorm)
        q, k, v = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
        norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        kernels.rotate(q, k, v, kwargs["position_embeddings"], layer, step.where, norms)
        q = q.unflatten(1, (-1, layer.keys.shape[3]))
        mixed = step.attend(q, layer, step, attention.scaling).flatten(1)
        normed, states = kernels.norm(attention.o_proj(mixed), self.post_attention_layernorm, states)
        inner, down = kernels.gate(mlp.gate_proj(normed), mlp.up_proj(normed)), mlp.down_proj
        if type(down) is nn.Linear and down.bias is None:
            return states.addmm_(inner, down.weight.t())[None]
        return (states + down(inner))[None]


def fused_kind(module: nn.Module) -> type[nn.Module] | None:
    """Return what takes the module's place, where nobody has changed how it is called."""
    modules = [module, *(child for name, child in module.named_modules() if not name.endswith("_proj"))]
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__ for part in modules):
        return None
    name = type(module).__name__
    if name.endswith("RMSNorm"):
        return FusedNorm
    return FusedLayer if name.endswith("DecoderLayer") and _like_llama(module) else None


def _like_llama(layer: nn.Module) -> bool:
    parts = {name: {*child._modules} for name, child in layer.named_children()}
    if {*parts} != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return False
    mlp: Any = layer.mlp
    right = parts["self_attn"] - NORMS == LINEARS and (NORMS <= parts["self_attn"] or not NORMS & parts["self_attn"])
    right = right and parts["mlp"] == {"gate_proj", "up_proj", "down_proj", "act_fn"}
    return right and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")


def can_attend(shapes: list[Shape]) -> bool:
    """Tell whether the attention kernel takes these layers."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return all(
        shape.key_size == shape.value_size in (16, 32, 64, 128, 256) and shape.dtype in kinds for shape in shapes
    )
