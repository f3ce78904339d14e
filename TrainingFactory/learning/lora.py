"""LoRA adapters through PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

from TrainingFactory.learning.routers import find_expert_modules
from TrainingFactory.models.adapters import set_adapter_dtype

# Model types whose fused Mamba kernels read this layer's weight without calling the layer; PEFT rejects it there.
MAMBA_TYPES, MAMBA_OUTPUT = {"falcon_h1", "nemotron_h"}, "out_proj"


def add_lora(
    model: Any,
    r: int = 16,
    alpha: int = 32,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    *,
    dora: bool = False,
    rslora: bool = False,
    experts: bool | None = None,
    seed: int = 0,
    excluded_modules: Sequence[str] = (),
) -> PeftModel:
    """Freeze the model and add a LoRA adapter that does not change the outputs initially. `target_modules` is
    "all-linear" (every linear layer but the head), or suffixes of layer names; `excluded_modules`: whole names.
    `experts`: adapt the fused weights of experts too; None: only where PEFT maps "all-linear" to them."""
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    if targets == "all-linear":
        layer_names = find_linear_layers(model)
        if experts is False:
            targets = _exclude_experts(layer_names, model)
        elif len(layer_names) < len(_find_linear_names(model)):
            targets = layer_names
    maps_to_experts = _maps_to_experts(model, targets)
    target_parameters = find_expert_weights(model) if experts and not maps_to_experts else []
    if experts and not (target_parameters or maps_to_experts):
        raise ValueError(
            "lora.experts is true, but the model has no experts that an adapter can change. Remove it"
        )
    if (dropout or dora) and (target_parameters or maps_to_experts):
        conflicting_option = f"lora.dropout={dropout:g}" if dropout else "lora.dora=true"
        raise ValueError(
            f"{conflicting_option} does not work with adapters of experts. Remove it, or set lora.experts=false"
        )
    config = LoraConfig(
        r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, task_type=TaskType.CAUSAL_LM,
        use_dora=dora, use_rslora=rslora, exclude_modules=list(excluded_modules) or None,
        target_parameters=target_parameters or None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft_model = get_peft_model(model, config)
    assert isinstance(peft_model, PeftModel)
    return set_adapter_dtype(peft_model, model.dtype)


def find_linear_layers(model: Any) -> list[str]:
    """Return the names of the linear layers that can have an adapter: all except the output layer, routers that return
    more than the output of a linear layer, and output projections whose weights Mamba kernels read without calling the
    layer."""
    is_mamba = model.config.model_type in MAMBA_TYPES
    return [
        name
        for name in _find_linear_names(model)
        if not hasattr(model.get_submodule(name), "top_k")
        and not (is_mamba and name.endswith(f".{MAMBA_OUTPUT}"))
    ]


def count_adapter_weights(model: Any) -> tuple[int, int, bool]:
    """Return the numbers of weights of rank-1 adapters on all linear layers and on the experts (and on routers, where
    PEFT adapts them too), and whether "all-linear" includes experts."""
    maps_to_experts = _maps_to_experts(model, "all-linear")
    names = find_linear_layers(model)
    layers = [
        model.get_submodule(name) for name in (_exclude_experts(names, model) if maps_to_experts else names)
    ]
    fused_weights = {name: model.get_parameter(name) for name in find_expert_weights(model)}
    # PEFT doubles the rank of two matrices in one; it also adapts the routers of these families.
    rank_factors = {name: 1 + (maps_to_experts and name.endswith("gate_up_proj")) for name in fused_weights}
    size = sum(
        rank_factors[name] * weight.shape[0] * sum(weight.shape[1:]) for name, weight in fused_weights.items()
    )
    if maps_to_experts:
        weights = dict(model.named_parameters())
        size += sum(sum(weight.shape) for name, weight in weights.items() if name.endswith(".gate.weight"))
    return sum(layer.in_features + layer.out_features for layer in layers), size, maps_to_experts


def _find_linear_names(model: Any) -> list[str]:
    head = model.get_output_embeddings()
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, torch.nn.Linear) and module is not head]


def find_expert_weights(model: Any) -> list[str]:
    """Return the names of the weights that hold a matrix for each expert."""
    return [
        f"{name}.{key}"
        for name, module in find_expert_modules(model).items()
        for key, weight in module.named_parameters(recurse=False)
        if weight.dim() == 3
    ]


def _exclude_experts(layer_names: list[str], model: Any) -> list[str]:
    """Return the names of the layers that PEFT does not map to fused experts."""
    partners = {"gate_proj": "up_proj", "up_proj": "gate_proj"}  # PEFT maps them together only
    leaf_names = {name.rpartition(".")[2] for name in layer_names}
    mapped_leaves = {leaf for leaf in leaf_names if _maps_to_experts(model, [leaf, partners.get(leaf, leaf)])}
    return [name for name in layer_names if name.rpartition(".")[2] not in mapped_leaves]


def _maps_to_experts(model: Any, targets: str | list[str]) -> bool:
    """Return whether PEFT maps one of these targets to fused experts, as it does for families whose experts were linear
    layers of that name in earlier versions of transformers."""
    config = LoraConfig(target_modules=targets)
    convert_peft_config_for_transformers(config, model, None)
    return bool(config.target_parameters)
