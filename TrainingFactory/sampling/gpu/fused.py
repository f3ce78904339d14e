"""Decoder layers of Llama-like models, and norms of others, that run the GPU kernels on the model's own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from TrainingFactory.sampling.cache.attention import StepContext
from TrainingFactory.sampling.cache.store import LayerShape
from TrainingFactory.sampling.cache.view import join_weights
from TrainingFactory.sampling.gpu import kernels

ZERO_CENTRED_NORMS = {"Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm"}  # x * (1 + weight)


class FusedLayer(nn.Module):
    """Decoder layer that runs nine kernels, plus eleven with LoRA. A projection that is neither a plain linear layer
    nor a LoRA layer is called as a module."""

    plain_class: Any  # the replaced class

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        step: StepContext = kwargs["tfactory_step"]
        if step.attend is None:  # the probe
            return self.plain_class.forward(self, hidden_states, **kwargs)
        assert step.cache is not None and step.cache_positions is not None
        attention: Any = self.self_attn
        mlp: Any = self.mlp
        layer, states = step.cache.layers[attention.layer_idx], hidden_states[0]
        normalised, _ = kernels.norm(states, self.input_layernorm)
        q, k, v = project(normalised, attention.q_proj, attention.k_proj, attention.v_proj)
        norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        kernels.norm_rotate_and_cache(
            q, k, v, kwargs["position_embeddings"], layer, step.cache_positions[layer.table], norms
        )
        attention_output = step.attend(
            q.unflatten(1, (-1, layer.keys.shape[3])), layer, step, attention.scaling
        )
        (attention_output,) = project(attention_output.flatten(1), attention.o_proj)
        normalised, states = kernels.norm(attention_output, self.post_attention_layernorm, states)
        gated = kernels.apply_gate(*project(normalised, mlp.gate_proj, mlp.up_proj))
        project(gated, mlp.down_proj, add_to=states)
        return states[None]


class Projection(NamedTuple):
    """A linear layer, and the two factors of its LoRA adapter if it has one."""

    layer: Any
    down: Any = None
    up: Any = None
    scaling: float = 1.0


def _split_lora(layer: Any) -> Projection:
    """Split a LoRA layer with one active adapter into its base layer and its adapter. Any other layer is returned
    whole."""
    if type(layer) is not LoraLinear or layer.disable_adapters or layer.merged:
        return Projection(layer)
    name = layer.active_adapters[0]
    if len(layer.active_adapters) > 1 or name not in layer.lora_A or name in layer.lora_variant:
        return Projection(layer)
    down, up = layer.lora_A[name], layer.lora_B[name]
    if up.bias is not None or up.weight.dtype != layer.base_layer.weight.dtype:
        return Projection(layer)
    return Projection(layer.base_layer, down, up, layer.scaling[name])


def project(states: torch.Tensor, *layers: Any, add_to: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
    """Return the outputs of all layers for the states [N, E]. The plain layers share one matrix product, and the down
    projections of their adapters share another one. If `add_to` is given, there must be one layer, and its output is
    added to `add_to` in place."""
    projections = [_split_lora(layer) for layer in layers]
    down_layers = [projection.down for projection in projections if projection.down is not None]
    weight = join_weights([projection.layer for projection in projections])
    down_weight = join_weights(down_layers) if down_layers else None
    if weight is None or (down_layers and down_weight is None):
        outputs = [layer(states) for layer in layers]
        return outputs if add_to is None else [add_to.add_(outputs[0])]
    product = torch.mm(states, weight.t()) if add_to is None else add_to.addmm_(states, weight.t())
    outputs = product.split([projection.layer.out_features for projection in projections], 1)
    if down_weight is not None:
        down = iter(torch.mm(states, down_weight.t()).split([layer.out_features for layer in down_layers], 1))
        for output, projection in zip(outputs, projections, strict=True):
            if projection.down is not None:
                output.addmm_(next(down), projection.up.weight.t(), alpha=projection.scaling)
    return outputs


class ZeroCentredNorm(nn.Module):
    """RMSNorm with weights around zero, in one kernel instead of seven."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return kernels.apply_zero_centred_norm(states, self)


class Float32Head(nn.Linear):
    """Output layer that returns float32 logits for 16-bit states, as the learner computes them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.mm(input[0], self.weight.t(), out_dtype=torch.float32)[None]


def use_float32_logits(head: Any) -> None:
    """Make a plain output layer with 16-bit weights on a GPU return float32 logits."""
    is_plain = type(head) is nn.Linear and head.bias is None
    if is_plain and head.weight.is_cuda and head.weight.dtype != torch.float32:
        head.__class__ = Float32Head


def get_fused_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the fused class for a decoder layer; None if the module is no supported decoder layer or has hooks or a
    wrapped forward."""
    if not type(module).__name__.endswith("DecoderLayer"):
        return None
    submodules: list[Any] = [module, *module.children()]
    has_silu = type(module.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")  # pyright: ignore
    return FusedLayer if has_silu and not _is_patched(submodules) else None


def get_norm_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the one-kernel class for a norm with weights around zero; None for other modules."""
    is_norm = type(module).__name__ in ZERO_CENTRED_NORMS
    return ZeroCentredNorm if is_norm and not _is_patched([module]) else None


def _is_patched(parts: Sequence[Any]) -> bool:
    return any(part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__ for part in parts)


# Model types -> the function that returns the classes of modules
FUSED_CLASS_GETTERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), get_fused_class),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), get_norm_class),
}


def can_attend(shapes: list[LayerShape]) -> bool:
    """Return whether the attention kernel supports these layers."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    has_sizes = all(shape.key_size == shape.value_size in (16, 32, 64, 128, 256, 512) for shape in shapes)
    return has_sizes and all(shape.dtype in dtypes for shape in shapes)
