"""LoRA adapters through PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model

from TrainingFactory.models.loading import set_adapter_dtype

# PEFT rejects an adapter on the output projection of these models' Mamba layers, whose fused kernels read its weight.
WITHOUT_OUT_PROJ = {"falcon_h1", "nemotron_h"}


def add_lora(
    model: Any,
    r: int = 16,
    alpha: int = 32,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = "all-linear",
    *,
    dora: bool = False,
    rslora: bool = False,
    seed: int = 0,
) -> PeftModel:
    """Freeze the model and add an adapter, initialised to change nothing. `target_modules` is "all-linear" (every
    linear layer but the head and some of Mamba layers), or suffixes of layer names."""
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    model_type = getattr(model.config, "model_type", None)
    excluded = ["out_proj"] if targets == "all-linear" and model_type in WITHOUT_OUT_PROJ else None
    config = LoraConfig(
        r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets, task_type=TaskType.CAUSAL_LM,
        exclude_modules=excluded, use_dora=dora, use_rslora=rslora,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)
    return set_adapter_dtype(adapted, model.dtype)
