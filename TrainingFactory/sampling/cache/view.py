"""Make a second tree of modules around a model's own parameters, with settings of its own: switching the learner's
model to another attention and to eval mode for every step would race with a learner in another thread."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedConfig, PreTrainedModel

ALTERNATIVES = "Sample this model with vLLM or with transformers' own `generate` instead."


def refuse(model_type: str, reason: str) -> ValueError:
    return ValueError(f"the native engine cannot sample a {model_type!r} model: {reason}. {ALTERNATIVES}")


def causal_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside `model`, with PEFT's LoRA layers in place, unmerged."""
    if isinstance(model, PreTrainedModel):
        return model
    unwrap = getattr(model, "get_base_model", None)
    if unwrap is None:
        kind = type(model).__name__
        raise ValueError(f"the native engine samples transformers and PEFT models, this is a {kind}")
    if model.active_peft_config.is_prompt_learning:
        name = model.active_peft_config.peft_type
        raise refuse(model.config.model_type, f"{name} adapters add virtual tokens outside its layers")
    return unwrap()


class OneCallNorm(nn.Module):
    """Does what Llama, Qwen and others call RMSNorm in one call instead of six, which counts on a CPU."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return rms_norm(states, self.weight.shape, self.weight, self.variance_epsilon)


@torch.no_grad()
def fuses(module: nn.Module) -> bool:
    """Tell whether `OneCallNorm` gives the same numbers, which is tried, for a module that nobody has changed."""
    weight, kind = module._parameters.get("weight"), type(module)
    if not hasattr(module, "variance_epsilon") or weight is None or weight.dim() != 1:
        return False
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not kind.__name__.endswith("RMSNorm"):
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._modules or "forward" in module.__dict__:
        return False
    size, twin = len(weight), kind.__new__(kind)
    # With weights that hide nothing, and small numbers, in which the epsilon shows.
    seen = {"weight": nn.Parameter(torch.linspace(0.5, 1.5, size))}
    twin.__dict__.update(module.__dict__, _parameters=seen)
    states = torch.linspace(-3, 3, 2 * size).view(2, -1)
    states = torch.cat([states, states * 1e-3])
    try:
        ours = rms_norm(states, (size,), twin.weight, float(twin.variance_epsilon))  # pyright: ignore
        return torch.allclose(twin(states), ours, 1e-6, 1e-6)
    except Exception:  # a class that we do not know
        return False


def shared_view(
    model: PreTrainedModel, attention: str, fused: Callable[[nn.Module], type[nn.Module] | None] | None = None
) -> PreTrainedModel:
    """Return the same weights under modules that are in eval mode and use the given attention function; `fused` names
    the classes that take other modules' places."""
    configs: dict[int, PreTrainedConfig] = {}
    modules: dict[int, nn.Module] = {}

    def view_config(config: PreTrainedConfig) -> PreTrainedConfig:
        if id(config) not in configs:
            twin = copy.deepcopy(config)
            twin._attn_implementation = attention
            configs[id(config)] = twin
        return configs[id(config)]

    def view(module: nn.Module) -> nn.Module:
        if id(module) in modules:
            return modules[id(module)]
        kind = (fused and fused(module)) or (OneCallNorm if fuses(module) else module.__class__)
        twin = modules[id(module)] = kind.__new__(kind)
        # The dict of parameters is shared, so that one which the learner replaces is seen here as well. The
        # dict of buffers is not: rotary tables may be replaced in a forward, and ours are inference tensors.
        twin.__dict__.update(module.__dict__)
        twin.__dict__.pop("forward", None)  # wrappers such as Accelerate's are bound to the learner's modules
        twin.__dict__["_buffers"] = dict(module._buffers)
        twin.__dict__["training"] = False
        twin.__dict__["plain"] = module.__class__
        if isinstance(config := module.__dict__.get("config"), PreTrainedConfig):
            twin.__dict__["config"] = view_config(config)
        twin.__dict__["_modules"] = {
            name: child if child is None else view(child) for name, child in module._modules.items()
        }
        return twin

    twin = view(model)
    assert isinstance(twin, PreTrainedModel)
    return twin


def join(layers: Sequence[Any]) -> torch.Tensor | None:
    """Let the weights of plain layers follow each other in memory, and return them as one; None for other layers."""
    if any(type(each) is not nn.Linear or each.bias is not None for each in layers):
        return None
    weights, size = [each.weight for each in layers], sum(each.out_features for each in layers)
    first, ends = weights[0], [each.data_ptr() + each.nbytes for each in weights]
    together = all(end == each.data_ptr() for end, each in zip(ends, weights[1:], strict=False))
    room = first.untyped_storage().nbytes() - first.storage_offset() * first.itemsize
    with torch.inference_mode(False), torch.no_grad():  # they are trained, too
        if together and room >= size * first.shape[1] * first.itemsize:
            return first.detach().as_strided((size, first.shape[1]), first.stride())
        whole = torch.cat(weights)
        for weight, part in zip(weights, whole.split([len(each) for each in weights]), strict=True):
            weight.data = part
        return whole


def check_model(model: PreTrainedModel) -> None:
    """Refuse what the slot cache cannot represent, as far as the config tells; the probe finds the rest."""
    config = model.config
    kind = config.model_type
    if config.is_encoder_decoder:
        raise refuse(kind, "it is an encoder-decoder")
    if not model._can_set_attn_implementation():
        raise refuse(kind, "its attention does not go through transformers' attention interface")
    if "logits_to_keep" not in inspect.signature(type(model).forward).parameters:
        raise refuse(kind, "its forward has no `logits_to_keep`, so it is not a causal language model")
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None) or []
    if odd := sorted({str(layer) for layer in layers} - {"full_attention"}):
        raise refuse(kind, f"it has {' and '.join(odd)} layers, and only full attention is supported")


def routes_tokens(model: PreTrainedModel) -> bool:
    """Tell whether tokens go to experts: then the shapes inside a layer depend on the rest of the batch."""
    text = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)
