"""A second module tree around a model's parameters, with its own settings. The engine does not switch the learner's
model to another attention and to eval mode for every step, because that would race with a learner in another thread."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedConfig, PreTrainedModel

from TrainingFactory.models.recurrent import PASSIVE_LAYERS, find_unsupported_types
from TrainingFactory.sampling.cache.latent import get_latent_class
from TrainingFactory.sampling.cache.states import get_recurrent_class

ATTENTION_NAME = "tfactory_pages"  # name of the engine's attention function in transformers
LAYER_TYPES = {"full_attention", "sliding_attention"}
ALTERNATIVES_HINT = (
    "`tfactory models --compat` and docs/COMPATIBILITY.md list the supported models; "
    "`sampling.engine: vllm` samples the models that vLLM supports."
)


def make_error(model_type: str, reason: str) -> ValueError:
    problem = f"the native engine cannot sample a {model_type!r} model: {reason}"
    return ValueError(f"{problem}. {ALTERNATIVES_HINT}")


def get_causal_lm(model: Any) -> PreTrainedModel:
    """Return the transformers model inside `model`, with PEFT's LoRA layers in place and unmerged."""
    if isinstance(model, PreTrainedModel):
        return model
    unwrap = getattr(model, "get_base_model", None)
    if unwrap is None:
        class_name = type(model).__name__
        raise ValueError(f"the native engine samples transformers and PEFT models, but got a {class_name}")
    if model.active_peft_config.is_prompt_learning:
        adapter_type = model.active_peft_config.peft_type
        raise make_error(
            model.config.model_type, f"{adapter_type} adapters add virtual tokens outside its layers"
        )
    return unwrap()


class FusedRMSNorm(nn.Module):
    """RMSNorm of Llama, Qwen and others in one call instead of six, for speed on a CPU."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return rms_norm(states, self.weight.shape, self.weight, self.variance_epsilon)


@torch.no_grad()
def can_fuse_norm(module: nn.Module) -> bool:
    """Return whether the module is an unmodified RMSNorm whose output on test inputs equals that of `FusedRMSNorm`."""
    weight, cls = module._parameters.get("weight"), type(module)
    if not hasattr(module, "variance_epsilon") or weight is None or weight.dim() != 1:
        return False
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not cls.__name__.endswith("RMSNorm"):
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._modules or "forward" in module.__dict__:
        return False
    size, norm_copy = len(weight), cls.__new__(cls)
    # Different weights, and small numbers that show the effect of epsilon.
    test_weights = {"weight": nn.Parameter(torch.linspace(0.5, 1.5, size))}
    norm_copy.__dict__.update(module.__dict__, _parameters=test_weights)
    states = torch.linspace(-3, 3, 2 * size).view(2, -1)
    states = torch.cat([states, states * 1e-3])
    try:
        fused = rms_norm(states, (size,), norm_copy.weight, float(norm_copy.variance_epsilon))  # pyright: ignore
        return torch.allclose(norm_copy(states), fused, 1e-6, 1e-6)
    except Exception:  # an unknown class
        return False


def make_view(
    model: PreTrainedModel,
    attention: str,
    get_class: Callable[[nn.Module], type[nn.Module] | None] | None = None,
) -> PreTrainedModel:
    """Return a module tree in eval mode with the same weights and the given attention function. `get_class` returns the
    class that replaces a module's class, or None."""
    configs: dict[int, PreTrainedConfig] = {}
    modules: dict[int, nn.Module] = {}

    def copy_config(config: PreTrainedConfig) -> PreTrainedConfig:
        if id(config) not in configs:
            config_copy = copy.deepcopy(config)
            config_copy._attn_implementation = attention
            configs[id(config)] = config_copy
        return configs[id(config)]

    def view(module: nn.Module) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        cls = (get_class and get_class(module)) or (
            FusedRMSNorm if can_fuse_norm(module) else module.__class__
        )
        if attention == ATTENTION_NAME:
            cls = get_recurrent_class(module) or get_latent_class(module) or cls
        view_module = modules[id(module)] = cls.__new__(cls)
        # The dict of parameters is shared, so that parameters replaced by the learner are replaced here too. The
        # dict of buffers is not: a forward may replace rotary tables, and here they are inference tensors.
        view_module.__dict__.update(module.__dict__)
        # Wrappers such as Accelerate's are bound to the learner's modules.
        view_module.__dict__.pop("forward", None)
        view_module.__dict__["_buffers"] = dict(module._buffers)
        view_module.__dict__["training"] = False
        view_module.__dict__["plain_class"] = module.__class__
        if isinstance(config := module.__dict__.get("config"), PreTrainedConfig):
            view_module.__dict__["config"] = copy_config(config)
        view_module.__dict__["_modules"] = {
            name: child if child is None else view(child) for name, child in module._modules.items()
        }
        return view_module

    view_model = view(model)
    assert isinstance(view_model, PreTrainedModel)
    return view_model


def join_weights(layers: Sequence[Any]) -> torch.Tensor | None:
    """Make the weights of plain linear layers contiguous in memory, and return them as one tensor. Return None if a
    layer is not plain."""
    if any(type(layer) is not nn.Linear or layer.bias is not None for layer in layers):
        return None
    weights, num_rows = [layer.weight for layer in layers], sum(layer.out_features for layer in layers)
    leader, end_addresses = weights[0], [weight.data_ptr() + weight.nbytes for weight in weights]
    are_contiguous = all(
        end == weight.data_ptr() for end, weight in zip(end_addresses, weights[1:], strict=False)
    )
    available_bytes = leader.untyped_storage().nbytes() - leader.storage_offset() * leader.itemsize
    with torch.inference_mode(False), torch.no_grad():  # because the learner trains these weights
        if are_contiguous and available_bytes >= num_rows * leader.shape[1] * leader.itemsize:
            return leader.detach().as_strided((num_rows, leader.shape[1]), leader.stride())
        joined_weight = torch.cat(weights)
        for weight, weight_part in zip(
            weights, joined_weight.split([len(weight) for weight in weights]), strict=True
        ):
            weight.data = weight_part
        return joined_weight


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError if the config shows that the engine does not support the model. The engine's probe run detects
    other unsupported models."""
    config = model.config
    arch = config.model_type
    if config.is_encoder_decoder:
        raise make_error(arch, "it is an encoder-decoder")
    if not model._can_set_attn_implementation():
        raise make_error(arch, "its attention does not go through transformers' attention interface")
    if "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
        raise make_error(arch, "its forward has no `logits_to_keep`, so it is not a causal language model")
    if unsupported_layers := find_unsupported_types(model, LAYER_TYPES):
        raise make_error(
            arch,
            f"it has {' and '.join(unsupported_layers)} layers; full and sliding attention and recurrent layers with "
            "transformers' cache are supported",
        )


def find_cached_layers(model: PreTrainedModel) -> set[int]:
    """Return the indices of layers that attend to other tokens or carry a state, unlike MLPs."""
    text_config = model.config.get_text_config()
    layer_types = getattr(text_config, "layer_types", None) or [None] * text_config.num_hidden_layers
    return {index for index, layer_type in enumerate(layer_types) if layer_type not in PASSIVE_LAYERS}


def routes_tokens(model: PreTrainedModel) -> bool:
    """Return whether the model routes tokens to experts, so that shapes inside a layer depend on the whole batch."""
    text_config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text_config, name, None) or 0) > 1 for name in names)
