"""Choice of a model's device and dtype, and conversion of its weights to them."""

from __future__ import annotations

from typing import Any

import torch

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch_device = torch.device(device)
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"model.device is {device!r}, but this machine has no CUDA device; use auto or cpu")
    return torch_device


def pick_dtype(dtype: str, device: torch.device = CPU) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"model.dtype is {dtype!r}, but it must be one of: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def convert_weights(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move the weights to the device and convert them to the dtype. Buffers that transformers keeps in float32 stay in
    float32, because a router with a bias in bfloat16 would choose other experts."""
    suffixes = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    buffers = {name: buffer.float() for name, buffer in model.named_buffers() if name.endswith(suffixes)}
    model = model.to(device=device, dtype=dtype)
    for name, buffer in buffers.items():
        module_path, _, buffer_name = name.rpartition(".")
        setattr(model.get_submodule(module_path), buffer_name, buffer.to(device))
    return model
