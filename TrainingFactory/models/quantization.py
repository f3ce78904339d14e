"""Quantization of a model's weights to 4 or 8 bits by bitsandbytes."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch

from TrainingFactory.models.names import TINY_IDS


def check_quantization(quantization: str, name: str) -> None:
    """Raise ValueError, before anything is loaded, if this model or this machine does not support quantization."""
    if quantization == "none":
        return
    if name in TINY_IDS or name.endswith(".gguf") or name.startswith("package:"):
        raise ValueError(f"model.quantization is {quantization}, but {name} cannot be quantized: remove it")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"model.quantization is {quantization}, which needs: pip install bitsandbytes")


def make_quantization_options(quantization: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    if quantization == "none":
        return {}
    from transformers import BitsAndBytesConfig

    # With 8 bits, bitsandbytes warns at every call that it computes in float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    options = {"4bit": {"load_in_4bit": True, **nf4}, "8bit": {"load_in_8bit": True}}[quantization]
    return {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": device}}


def keep_trainable(model: Any) -> None:
    """Disable the bfloat16 instructions of the CPU in bitsandbytes. With them it repacks 4-bit weights at the first
    forward without gradient, and no gradient passes through the repacked weights."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
