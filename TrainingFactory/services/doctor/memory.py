"""How much memory a run takes on its device, estimated from the model and the config."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.config import TrainingConfig
from TrainingFactory.services.doctor.diagnosis import Diagnosis

OPTIMIZER = {"adamw": 8, "adamw_8bit": 2, "muon": 8}  # bytes of state for each trained weight, at most
# Values that a layer keeps for the backward pass, in widths of the model: attention by parts, an MLP of four widths.
KEPT = 17


def estimate(config: TrainingConfig, model: Any, needs: frozenset[str], max_length: int) -> dict[str, float]:
    """Return bytes by what they are for. The head's logits come in chunks and are not counted."""
    training, shape = config.training, model.config.get_text_config()
    params = list(model.parameters())
    trained = sum(each.numel() for each in params if each.requires_grad)
    exact = sum(each.numel() for each in params if each.requires_grad and each.dtype == torch.float32)
    weights, size = sum(each.nbytes for each in params), max(2, params[0].element_size())
    learned = 4 * (trained - exact) + 4 * trained  # float32 copies, and gradients
    found = {"weights": weights, "gradients": learned, "optimizer": OPTIMIZER[training.optimizer] * trained}
    alone = not config.lora.enabled and config.model.adapter is None
    if "reference" in needs and "precomputed" not in needs and alone:
        found["reference model"] = weights
    if "critic" in needs:
        found["critic"] = weights + learned + found["optimizer"]
    learners = config.compute.learners or 1
    found = {name: count / learners for name, count in found.items()}  # all of that is sharded
    episodes, tokens = training.batch_size * training.group_size, training.token_budget
    if KINDS[training.algorithm].samples:
        if (ahead := config.optimization.bound) or learners > 1:  # of a sharded learner all are copied
            copied = [each.nbytes for each in params if each.requires_grad or learners > 1]
            found["the sampler's weights"] = sum(copied)
        slots = min(config.sampling.slots, episodes * (1 + ahead))
        found["cache"] = cache_bytes(shape, slots, max_length, size)
    tokens = min(tokens, episodes * max_length)
    found["activations"] = activation_bytes(shape, tokens, training.gradient_checkpointing, size)
    return {name: float(count) for name, count in found.items()}


def activation_bytes(shape: Any, tokens: int, checkpointing: bool, size: int) -> int:
    """Return the bytes that a pack of tokens leaves for the backward pass; `shape` is the text config."""
    layers = shape.num_hidden_layers * (1 if checkpointing else KEPT)
    return tokens * shape.hidden_size * size * (layers + KEPT * checkpointing)


def cache_bytes(shape: Any, slots: int, max_length: int, size: int) -> int:
    """Return the bytes of the native engine's keys and values when all slots are full; `shape` is the text config."""
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads  # foreign object
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return 2 * shape.num_hidden_layers * heads * width * size * (slots + 1) * max_length


def free_bytes(device: torch.device) -> int:
    """Return the memory that this process can still have on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for itself
    return torch.cuda.mem_get_info(device)[0] + kept


def check_memory(found: Diagnosis, needed: dict[str, float], device: torch.device) -> None:
    """Say how much it is and whether it fits."""
    on_gpu = device.type == "cuda"
    there = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    total = sum(needed.values())
    parts = ", ".join(f"{name} {amount(count)}" for name, count in needed.items())
    found.facts["memory"] = f"about {amount(total)} of {amount(there)} on {device}: {parts}"
    if total > 0.9 * there:
        largest = max(needed, key=lambda name: needed[name])
        found.add(
            "memory",
            f"training takes about {amount(total)}, and {device} has {amount(there)}; most of it is for {largest}",
            severity="error" if total > there else "warning",
        )


def amount(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
