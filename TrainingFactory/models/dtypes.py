"""Conversion of a model's weights to a device and dtype."""

from __future__ import annotations

from typing import Any

import torch


def convert_weights(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Convert the weights, but leave the buffers in float32 that transformers keeps so: in bfloat16 the bias by which a
    router chooses experts would choose others."""
    exact = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    kept = {name: value.float() for name, value in model.named_buffers() if exact and name.endswith(exact)}
    model = model.to(device=device, dtype=dtype)
    for name, value in kept.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, value.to(device))
    return model
