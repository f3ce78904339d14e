"""Estimate how much memory a run takes on its device, from the model and the config."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import psutil
import torch

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.config import TrainingConfig
from TrainingFactory.runs.diagnosis import Diagnosis

Estimate = Callable[[TrainingConfig], dict[str, float]]  # the bytes of a config, by part
OPTIMIZER = {"adamw": 8, "adamw_8bit": 2, "muon": 8}  # bytes of state for each trained weight, at most
# part -> options that make it smaller, the one that changes least first
CUTS = {
    "activations": ["training.gradient_checkpointing", "training.token_budget"],
    "optimizer": ["training.optimizer", "lora.enabled"],
    "weights": ["model.quantization"],
    "cache": ["sampling.slots", "model.max_length"],
    "all": ["lora.enabled"],  # others: something for every weight that is trained
}
FULL = 0.9  # of the device's memory: more is reported
LEAST_TOKENS = 1024  # that a smaller training.token_budget is suggested down to
SMALL = 0.05  # of all: a part that is not worth a remedy


class Held(NamedTuple):
    """Counts the weights of a model."""

    weights: int
    stored: float  # bytes of all of them
    trained: int
    exact: int  # trained ones that are stored in float32, and need no copy
    size: int  # bytes of a number that is computed with

    @classmethod
    def of(cls, model: Any) -> Held:
        params = list(model.parameters())
        trained = [each for each in params if each.requires_grad]
        exact = sum(each.numel() for each in trained if each.dtype == torch.float32)
        counts = [sum(each.numel() for each in some) for some in (params, trained)]
        stored, size = sum(each.nbytes for each in params), max(2, params[0].element_size())
        return cls(counts[0], stored, counts[1], exact, size)


def with_changes(config: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    """Return a config with other values, by dotted keys."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


def estimate(config: TrainingConfig, model: Any, needs: Set[str], max_length: int) -> dict[str, float]:
    """Return the bytes that a run takes with a loaded model, by what they are for."""
    return needed(config, model.config.get_text_config(), Held.of(model), needs, max_length)


def needed(
    config: TrainingConfig, shape: Any, held: Held, needs: Set[str], max_length: int
) -> dict[str, float]:
    """Return the bytes on the device of a learner that samples too; `shape` is a text config, or has its names."""
    training, learners, ahead = config.training, config.compute.learners or 1, config.optimization.bound
    episodes = training.batch_size * training.group_size
    found = learner_bytes(
        config, shape, held, needs, learners, min(training.token_budget, episodes * max_length)
    )
    if KINDS[training.algorithm].samples:
        if ahead or learners > 1:  # of a sharded learner all are copied
            found["the sampler's weights"] = held.stored if learners > 1 else held.size * held.trained
        slots = min(config.sampling.slots, episodes * (1 + ahead))
        found["cache"] = cache_bytes(shape, slots, max_length, held.size)
    return {name: float(count) for name, count in found.items()}


def learner_bytes(
    config: TrainingConfig, shape: Any, held: Held, needs: Set[str], learners: int, tokens: int
) -> dict[str, float]:
    """Return the bytes on each device that learns, with packs of so many tokens. The head's logits come in chunks and
    are not counted. Alone it has the weights as they are stored, and float32 copies of those that are trained; shards
    of these are float32, with two layers and the head at a time gathered as they are computed with."""
    ends = shape.hidden_size * shape.vocab_size
    tied = getattr(shape, "tie_word_embeddings", True)  # foreign object
    layer = (held.weights - ends * (1 if tied else 2)) / shape.num_hidden_layers
    gathered = 0.0 if learners == 1 else held.size * (2 * layer + ends)
    kept = held.stored if learners == 1 else held.stored * (1 - held.trained / held.weights)
    found = {
        "weights": kept / learners + gathered,
        "float32 copies": 4 * (held.trained - (held.exact if learners == 1 else 0)) / learners,
        "gradients": 4 * held.trained / learners,
        "optimizer": OPTIMIZER[config.training.optimizer] * held.trained / learners,
    }
    learned = sum(found.values()) - gathered
    alone = not config.lora.enabled and config.model.adapter is None
    if "reference" in needs and "precomputed" not in needs and alone:
        found["reference model"] = held.stored / learners
    if "critic" in needs:
        found["critic"] = learned
    left = activation_bytes(shape, tokens, config.training.gradient_checkpointing, held.size)
    if learners == 1:  # layer by layer the backward pass frees them and leaves gradients in as many bits
        found["gradients"] += max(0, held.size * (held.trained - held.exact) - left)
    return found | {"activations": float(left)}


def activation_bytes(shape: Any, tokens: int, checkpointing: bool, size: int) -> int:
    """Return the bytes that a pack of tokens leaves for the backward pass; `shape` is the text config. A layer keeps
    what comes in, what it adds, both norms, queries, keys and values before and after they are rotated, the mix of
    values, and three times the width of its MLP."""
    wide = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size  # foreign object
    queries, keys = attention_widths(shape)
    layer = 4 * shape.hidden_size + 3 * (queries + keys) + 3 * wide
    each = shape.hidden_size if checkpointing else layer
    return tokens * size * (shape.num_hidden_layers * each + layer * checkpointing)


def cache_bytes(shape: Any, slots: int, max_length: int, size: int) -> int:
    """Return the bytes of the native engine's keys and values when all slots are full; `shape` is the text config."""
    return 2 * shape.num_hidden_layers * attention_widths(shape)[1] * size * (slots + 1) * max_length


def attention_widths(shape: Any) -> tuple[int, int]:
    """Return the widths of a token's queries and of its keys."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads  # foreign object
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return shape.num_attention_heads * width, heads * width


def free_bytes(device: torch.device) -> int:
    """Return the memory that this process can still have on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for itself
    return torch.cuda.mem_get_info(device)[0] + kept


def check_memory(
    found: Diagnosis, config: TrainingConfig, needed: dict[str, float], device: torch.device,
    estimate_other: Estimate | None = None,
) -> None:  # fmt: skip
    """Add how much memory a run takes on a device, and a finding where it does not fit."""
    on_gpu = device.type == "cuda"
    there = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    compare_memory(found, config, needed, there, str(device), estimate_other)


def compare_memory(
    found: Diagnosis, config: TrainingConfig, needed: dict[str, float], there: float, device: str,
    estimate_other: Estimate | None = None,
) -> None:  # fmt: skip
    total = sum(needed.values())
    parts = ", ".join(f"{name} {amount(count)}" for name, count in needed.items() if count)
    found.facts["memory"] = f"about {amount(total)} of {amount(there)} on {device}: {parts}"
    if total > FULL * there:
        largest = max(needed, key=lambda name: needed[name])
        fitting = find_fitting(config, there, device, estimate_other) if estimate_other else ""
        found.add(
            "memory",
            f"training takes about {amount(total)}, where {device} has {amount(there)}; largest part: {largest}",
            "error" if total > there else "warning",
            f"{fitting}{remedy(config, needed, device)}",
        )


def savings(config: TrainingConfig, device: str) -> dict[str, Any]:
    """Return the options that save memory and can still be set, the one that changes a run least first."""
    training, sampling, model = config.training, config.sampling, config.model
    alone, adapted = not config.compute.learners, config.lora.enabled or model.adapter is not None
    found: dict[str, Any] = {}
    if not training.gradient_checkpointing:
        found["training.gradient_checkpointing"] = True
    if training.token_budget > LEAST_TOKENS:
        found["training.token_budget"] = max(LEAST_TOKENS, training.token_budget // 4)
    if training.optimizer != "adamw_8bit" and alone and device != "cpu":
        found["training.optimizer"] = "adamw_8bit"
    if sampling.slots >= 8:
        found["sampling.slots"] = sampling.slots // 4
    if not adapted:
        found["lora.enabled"] = True
    if model.quantization != "4bit" and alone:
        found["model.quantization"] = "4bit"
    if model.max_length:
        found["model.max_length"] = model.max_length // 2
    return found


def find_fitting(config: TrainingConfig, there: float, device: str, estimate_other: Estimate) -> str:
    """Return the smallest combination of `savings` that fits, with what it takes; an empty text where none does."""
    options = savings(config, device)
    for count in range(1, len(options) + 1):
        for keys in itertools.combinations(options, count):
            changed = with_changes(config, {key: options[key] for key in keys})
            adapted = changed.lora.enabled or changed.model.adapter is not None
            if "model.quantization" in keys and not adapted:
                continue
            total = sum(estimate_other(changed).values())
            if total <= FULL * there:
                text = " ".join(setting(key, options[key]) for key in keys)
                return f"This fits, with about {amount(total)}: {text}. "
    return ""


def setting(key: str, value: Any) -> str:
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def remedy(config: TrainingConfig, needed: dict[str, float] | None = None, device: str = "cuda") -> str:
    """Return what to set, for the largest part first; for every part where their sizes are not known."""
    needed, options = needed or dict.fromkeys(CUTS, 1.0), savings(config, device)
    if not config.lora.enabled and config.model.adapter is None:
        options.pop("model.quantization", None)  # weights that are trained are not quantized
    large = [part for part in needed if needed[part] > SMALL * sum(needed.values())]
    parts = sorted(large, key=lambda part: -needed[part])
    keys = [key for part in parts for key in CUTS.get(part, CUTS["all"]) if key in options]
    listed = ", ".join(setting(key, options[key]) for key in dict.fromkeys(keys))
    return f"Options that save memory, the largest part first: {listed}." if listed else ""


def amount(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
