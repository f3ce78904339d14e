"""Comparison of a run's memory with its device, and the options that reduce it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from TrainingFactory.assembly.memory import GIB
from TrainingFactory.config import TrainingConfig
from TrainingFactory.runs.diagnosis import Diagnosis

MemoryEstimator = Callable[[TrainingConfig], dict[str, float]]  # returns the bytes of a config by part
# part -> options that reduce it, the least intrusive first
REDUCING_OPTIONS = {
    "activations": [
        "training.gradient_checkpointing",
        "training.token_budget",
        "training.activation_offload",
    ],
    "optimizer": ["training.optimizer", "lora.enabled"],
    "weights": ["model.quantization"],
    "cache": ["sampling.slots", "model.max_length"],
    "states": ["sampling.slots"],
    "encoded images": ["model.image_tokens", "training.token_budget"],
    "vision activations": ["model.image_tokens", "training.gradient_checkpointing", "training.token_budget"],
    "all": ["lora.enabled"],  # all other parts, which grow with the number of trained weights
}
MAX_MEMORY_SHARE = 0.9  # share of the device's memory above which the doctor reports a finding
MIN_TOKEN_BUDGET = 1024  # smallest training.token_budget that is suggested
MIN_IMAGE_TOKENS = 64  # smallest model.image_tokens that is suggested
MIN_PART_SHARE = 0.05  # share of the total below which a part gets no remedy


def with_changes(config: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    """Return a copy of the config with changed values, by dotted key."""
    for key, value in changes.items():
        section, _, option_name = key.partition(".")
        changed_section = getattr(config, section).model_copy(update={option_name: value})
        config = config.model_copy(update={section: changed_section})
    return config


def check_memory(
    diagnosis: Diagnosis, config: TrainingConfig, usage: dict[str, float], device: torch.device,
    estimator: MemoryEstimator | None = None,
) -> None:  # fmt: skip
    """Report a run's memory on a device, and add a finding if the device has too little. `estimator`
    estimates changed configs, to suggest options that fit."""
    on_gpu = device.type == "cuda"
    capacity = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    compare_memory(diagnosis, config, usage, capacity, str(device), estimator)


def compare_memory(
    diagnosis: Diagnosis, config: TrainingConfig, usage: dict[str, float], capacity: float, device: str,
    estimator: MemoryEstimator | None = None,
) -> None:  # fmt: skip
    usage = usage | _limit_cache(diagnosis, config, usage, MAX_MEMORY_SHARE * capacity)
    total = sum(usage.values())
    part_sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in usage.items() if size)
    diagnosis.facts["memory"] = (
        f"about {format_bytes(total)} of {format_bytes(capacity)} on {device}: {part_sizes}"
    )
    if total > MAX_MEMORY_SHARE * capacity:
        largest_part = max(usage, key=lambda name: usage[name])
        advice = find_fitting_options(config, capacity, device, estimator) if estimator else ""
        diagnosis.add(
            "memory",
            f"training needs about {format_bytes(total)}, but {device} has {format_bytes(capacity)}; largest part: "
            f"{largest_part}",
            "error" if total > capacity else "warning",
            f"{advice}{suggest_options(config, usage, device)}",
        )


def _limit_cache(
    diagnosis: Diagnosis, config: TrainingConfig, usage: dict[str, float], capacity: float
) -> dict[str, float]:
    """Return the bytes of the KV cache, limited to the memory that the other parts leave. Report how many episodes it
    holds."""
    if not (full_cache_bytes := usage.get("cache", 0.0)):
        return {}
    free_bytes = capacity - sum(usage.values()) + full_cache_bytes
    if config.sampling.cache_gib is not None:
        free_bytes = config.sampling.cache_gib * GIB - usage.get("states", 0.0)
    slots = config.sampling.slots
    num_episodes = min(slots, int(free_bytes / full_cache_bytes * slots))  # of full length that fit
    if num_episodes < 1:
        return {"cache": full_cache_bytes / slots}
    if num_episodes == slots:
        return {"cache": full_cache_bytes}
    diagnosis.facts["KV cache"] = (
        f"{format_bytes(free_bytes)} of pages: {num_episodes} of {slots} episodes at full length, more if they are "
        "shorter or share prefixes"
    )
    if 2 * num_episodes < slots:
        diagnosis.add(
            "cache",
            f"the KV cache has {format_bytes(free_bytes)}, which {num_episodes} of {slots} episodes fill at full "
            "length; further ones wait, or are prefilled again",
            "warning",
            "Lower model.max_length or sampling.slots, or free memory: "
            + suggest_options(config, {name: size for name, size in usage.items() if name != "cache"}),
        )
    return {"cache": free_bytes}


def list_saving_options(config: TrainingConfig, device: str) -> dict[str, Any]:
    """Return the memory-saving options that are not set yet, the least intrusive first."""
    training, sampling, model = config.training, config.sampling, config.model
    is_local, has_adapter = not config.compute.learners, config.lora.enabled or model.adapter is not None
    options: dict[str, Any] = {}
    if not training.gradient_checkpointing:
        options["training.gradient_checkpointing"] = True
    elif not training.activation_offload and device != "cpu":
        options["training.activation_offload"] = True
    if training.token_budget > MIN_TOKEN_BUDGET:
        options["training.token_budget"] = max(MIN_TOKEN_BUDGET, training.token_budget // 4)
    if training.optimizer != "adamw_8bit" and is_local and device != "cpu":
        options["training.optimizer"] = "adamw_8bit"
    if sampling.slots >= 8:
        options["sampling.slots"] = sampling.slots // 4
    if not has_adapter:
        options["lora.enabled"] = True
    if model.vision and model.image_tokens > MIN_IMAGE_TOKENS:
        options["model.image_tokens"] = max(MIN_IMAGE_TOKENS, model.image_tokens // 4)
    if model.quantization != "4bit" and is_local:
        options["model.quantization"] = "4bit"
    if model.max_length:
        options["model.max_length"] = model.max_length // 2
    return options


def find_fitting_options(
    config: TrainingConfig, capacity: float, device: str, estimator: MemoryEstimator
) -> str:
    """Return the smallest combination of `list_saving_options` that fits, with its memory; empty if none fits."""
    options = list_saving_options(config, device)
    for num_options in range(1, len(options) + 1):
        for keys in itertools.combinations(options, num_options):
            changed_config = with_changes(config, {key: options[key] for key in keys})
            has_adapter = changed_config.lora.enabled or changed_config.model.adapter is not None
            if "model.quantization" in keys and not has_adapter:
                continue
            total_bytes = sum(estimator(changed_config).values())
            if total_bytes <= MAX_MEMORY_SHARE * capacity:
                settings = " ".join(format_option(key, options[key]) for key in keys)
                return f"To fit, in about {format_bytes(total_bytes)}, set: {settings}. "
    return ""


def format_option(key: str, value: Any) -> str:
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def suggest_options(
    config: TrainingConfig, usage: dict[str, float] | None = None, device: str = "cuda"
) -> str:
    """Return a text with the options that save memory, those for the largest part first. If `usage` is None, it lists
    the options for every part."""
    usage, options = usage or dict.fromkeys(REDUCING_OPTIONS, 1.0), list_saving_options(config, device)
    if not config.lora.enabled and config.model.adapter is None:
        options.pop("model.quantization", None)  # trained weights cannot be quantized
    large_parts = [part for part in usage if usage[part] > MIN_PART_SHARE * sum(usage.values())]
    parts = sorted(large_parts, key=lambda part: -usage[part])
    keys = [
        key for part in parts for key in REDUCING_OPTIONS.get(part, REDUCING_OPTIONS["all"]) if key in options
    ]
    settings = ", ".join(format_option(key, options[key]) for key in dict.fromkeys(keys))
    return f"Options that save memory, largest part first: {settings}." if settings else ""


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
