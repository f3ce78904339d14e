"""Estimates of a run's device memory, from the model and the config."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import psutil
import torch

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.config import TrainingConfig
from TrainingFactory.runs.diagnosis import Diagnosis

MemoryEstimator = Callable[[TrainingConfig], dict[str, float]]  # returns the bytes of a config by part
# Maximum bytes of optimizer state per trained weight.
OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2, "muon": 8}
# part -> options that reduce it, the least intrusive first
REDUCING_OPTIONS = {
    "activations": ["training.gradient_checkpointing", "training.token_budget"],
    "optimizer": ["training.optimizer", "lora.enabled"],
    "weights": ["model.quantization"],
    "cache": ["sampling.slots", "model.max_length"],
    "all": ["lora.enabled"],  # all other parts, which grow with the number of trained weights
}
MAX_MEMORY_SHARE = 0.9  # share of the device's memory above which the doctor reports a finding
MIN_TOKEN_BUDGET = 1024  # smallest training.token_budget that is suggested
MIN_PART_SHARE = 0.05  # share of the total below which a part gets no remedy


class WeightCounts(NamedTuple):
    """Number and size of a model's weights."""

    weights: int
    stored: float  # bytes of all weights
    trained: int
    exact: int  # trained weights stored in float32, which need no master copy
    size: int  # bytes per value of the compute dtype

    @classmethod
    def of(cls, model: Any) -> WeightCounts:
        params = list(model.parameters())
        trained = [param for param in params if param.requires_grad]
        exact = sum(param.numel() for param in trained if param.dtype == torch.float32)
        counts = [sum(param.numel() for param in group) for group in (params, trained)]
        stored, size = sum(param.nbytes for param in params), max(2, params[0].element_size())
        return cls(counts[0], stored, counts[1], exact, size)


def with_changes(config: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    """Return a copy of the config with changed values, by dotted key."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


def estimate_model_memory(
    config: TrainingConfig, model: Any, needs: Set[str], max_length: int
) -> dict[str, float]:
    """Return the bytes that a run needs for a loaded model, by part."""
    return needed(config, model.config.get_text_config(), WeightCounts.of(model), needs, max_length)


def needed(
    config: TrainingConfig, shape: Any, counts: WeightCounts, needs: Set[str], max_length: int
) -> dict[str, float]:
    """Return the bytes by part on a device that learns and samples; `shape` has the attributes of a text config."""
    training, learners, ahead = (
        config.training,
        config.compute.learners or 1,
        config.optimization.effective_max_staleness,
    )
    episodes = training.batch_size * training.group_size
    parts = learner_bytes(
        config, shape, counts, needs, learners, min(training.token_budget, episodes * max_length)
    )
    if KINDS[training.algorithm].samples:
        if ahead or learners > 1:  # the sampler of a sharded learner has a full copy
            parts["the sampler's weights"] = counts.stored if learners > 1 else counts.size * counts.trained
        slots = min(config.sampling.slots, episodes * (1 + ahead))
        parts["cache"] = cache_bytes(shape, slots, max_length, counts.size)
    return {name: float(count) for name, count in parts.items()}


def learner_bytes(
    config: TrainingConfig, shape: Any, counts: WeightCounts, needs: Set[str], learners: int, tokens: int
) -> dict[str, float]:
    """Return the bytes on each learner's device, with packs of `tokens` tokens. Logits are computed in chunks and not
    counted. A single learner holds the stored weights and float32 copies of the trained ones. Shards of trained weights
    are float32, and two layers and the head at a time are gathered in the compute dtype."""
    ends = shape.hidden_size * shape.vocab_size
    tied = getattr(shape, "tie_word_embeddings", True)  # foreign object
    layer = (counts.weights - ends * (1 if tied else 2)) / shape.num_hidden_layers
    gathered = 0.0 if learners == 1 else counts.size * (2 * layer + ends)
    stored = counts.stored if learners == 1 else counts.stored * (1 - counts.trained / counts.weights)
    parts = {
        "weights": stored / learners + gathered,
        "float32 copies": 4 * (counts.trained - (counts.exact if learners == 1 else 0)) / learners,
        "gradients": 4 * counts.trained / learners,
        "optimizer": OPTIMIZER_BYTES[config.training.optimizer] * counts.trained / learners,
    }
    learned = sum(parts.values()) - gathered
    alone = not config.lora.enabled and config.model.adapter is None
    if "reference" in needs and "precomputed" not in needs and alone:
        parts["reference model"] = counts.stored / learners
    if "critic" in needs:
        parts["critic"] = learned
    left = activation_bytes(shape, tokens, config.training.gradient_checkpointing, counts.size)
    if learners == 1:  # layer by layer, backward frees activations and adds gradients in the compute dtype
        parts["gradients"] += max(0, counts.size * (counts.trained - counts.exact) - left)
    return parts | {"activations": float(left)}


def activation_bytes(shape: Any, tokens: int, checkpointing: bool, size: int) -> int:
    """Return the bytes of activations that a pack keeps for backward; `shape` is the text config. A layer keeps its
    input, its output, both norms, queries, keys and values before and after rotary embedding, the attention output, and
    three times the width of its MLP."""
    wide = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size  # foreign object
    queries, keys = attention_widths(shape)
    layer = 4 * shape.hidden_size + 3 * (queries + keys) + 3 * wide
    per_layer = shape.hidden_size if checkpointing else layer
    return tokens * size * (shape.num_hidden_layers * per_layer + layer * checkpointing)


def cache_bytes(shape: Any, slots: int, max_length: int, size: int) -> int:
    """Return the bytes of the native engine's KV cache with all slots full; `shape` is the text config."""
    return 2 * shape.num_hidden_layers * attention_widths(shape)[1] * size * (slots + 1) * max_length


def attention_widths(shape: Any) -> tuple[int, int]:
    """Return the total width of a token's queries and of its keys, over all heads."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads  # foreign object
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return shape.num_attention_heads * width, heads * width


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own cache
    return torch.cuda.mem_get_info(device)[0] + cached


def check_memory(
    diagnosis: Diagnosis, config: TrainingConfig, needed: dict[str, float], device: torch.device,
    estimate_other: MemoryEstimator | None = None,
) -> None:  # fmt: skip
    """Report a run's memory on a device, with a finding if it exceeds it; `estimate_other` finds options that fit."""
    on_gpu = device.type == "cuda"
    available = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    compare_memory(diagnosis, config, needed, available, str(device), estimate_other)


def compare_memory(
    diagnosis: Diagnosis, config: TrainingConfig, needed: dict[str, float], available: float, device: str,
    estimate_other: MemoryEstimator | None = None,
) -> None:  # fmt: skip
    total = sum(needed.values())
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in needed.items() if count)
    diagnosis.facts["memory"] = (
        f"about {format_bytes(total)} of {format_bytes(available)} on {device}: {parts}"
    )
    if total > MAX_MEMORY_SHARE * available:
        largest = max(needed, key=lambda name: needed[name])
        fitting = find_fitting(config, available, device, estimate_other) if estimate_other else ""
        diagnosis.add(
            "memory",
            f"training needs about {format_bytes(total)}, but {device} has {format_bytes(available)}; largest part: "
            f"{largest}",
            "error" if total > available else "warning",
            f"{fitting}{suggest_options(config, needed, device)}",
        )


def saving_options(config: TrainingConfig, device: str) -> dict[str, Any]:
    """Return the memory-saving options that are not set yet, the least intrusive first."""
    training, sampling, model = config.training, config.sampling, config.model
    alone, adapted = not config.compute.learners, config.lora.enabled or model.adapter is not None
    options: dict[str, Any] = {}
    if not training.gradient_checkpointing:
        options["training.gradient_checkpointing"] = True
    if training.token_budget > MIN_TOKEN_BUDGET:
        options["training.token_budget"] = max(MIN_TOKEN_BUDGET, training.token_budget // 4)
    if training.optimizer != "adamw_8bit" and alone and device != "cpu":
        options["training.optimizer"] = "adamw_8bit"
    if sampling.slots >= 8:
        options["sampling.slots"] = sampling.slots // 4
    if not adapted:
        options["lora.enabled"] = True
    if model.quantization != "4bit" and alone:
        options["model.quantization"] = "4bit"
    if model.max_length:
        options["model.max_length"] = model.max_length // 2
    return options


def find_fitting(
    config: TrainingConfig, available: float, device: str, estimate_other: MemoryEstimator
) -> str:
    """Return the smallest combination of `saving_options` that fits, with its memory; empty if none fits."""
    options = saving_options(config, device)
    for count in range(1, len(options) + 1):
        for keys in itertools.combinations(options, count):
            changed = with_changes(config, {key: options[key] for key in keys})
            adapted = changed.lora.enabled or changed.model.adapter is not None
            if "model.quantization" in keys and not adapted:
                continue
            total = sum(estimate_other(changed).values())
            if total <= MAX_MEMORY_SHARE * available:
                text = " ".join(format_option(key, options[key]) for key in keys)
                return f"To fit, in about {format_bytes(total)}, set: {text}. "
    return ""


def format_option(key: str, value: Any) -> str:
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def suggest_options(
    config: TrainingConfig, needed: dict[str, float] | None = None, device: str = "cuda"
) -> str:
    """Return the options to set, for the largest part first; for every part if `needed` is None."""
    needed, options = needed or dict.fromkeys(REDUCING_OPTIONS, 1.0), saving_options(config, device)
    if not config.lora.enabled and config.model.adapter is None:
        options.pop("model.quantization", None)  # trained weights cannot be quantized
    large = [part for part in needed if needed[part] > MIN_PART_SHARE * sum(needed.values())]
    parts = sorted(large, key=lambda part: -needed[part])
    keys = [
        key for part in parts for key in REDUCING_OPTIONS.get(part, REDUCING_OPTIONS["all"]) if key in options
    ]
    listed = ", ".join(format_option(key, options[key]) for key in dict.fromkeys(keys))
    return f"Options that save memory, largest part first: {listed}." if listed else ""


def format_bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
