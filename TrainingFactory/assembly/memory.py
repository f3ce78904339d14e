"""Estimates of a run's device memory, from the model and the config."""

from __future__ import annotations

import gc
import math
from collections.abc import Set
from typing import Any, NamedTuple

import psutil
import torch

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.branching import count_max_leaves
from TrainingFactory.assembly.states import count_kv_layers, get_row_bytes
from TrainingFactory.config import TrainingConfig
from TrainingFactory.learning.forward import get_causal_lm
from TrainingFactory.models.tower_shape import ImageUse, TowerShape, measure_loaded_tower
from TrainingFactory.models.vision import CACHE_BYTES
from TrainingFactory.sampling.cache.store import get_free_memory
from TrainingFactory.sampling.sizing import SNAPSHOTS_PER_SLOT

# Maximum bytes of optimizer state per trained weight.
OPTIMIZER_BYTES = {"adamw": 8, "adamw_8bit": 2, "muon": 8}
GIB = 2**30
MIN_CACHE_SHARE = 0.25  # of the free memory, for the KV cache, even if the learner is estimated to need more


class WeightCounts(NamedTuple):
    """The number of a model's weights, and their size in memory."""

    num_weights: int
    nbytes: float  # of all weights
    num_trained: int
    num_float32: int  # trained weights stored in float32, which need no master copy
    itemsize: int  # bytes per value of the compute dtype

    @classmethod
    def from_model(cls, model: Any) -> WeightCounts:
        params = list(model.parameters())
        trained_params = [param for param in params if param.requires_grad]
        num_float32 = sum(param.numel() for param in trained_params if param.dtype == torch.float32)
        num_weights = [sum(param.numel() for param in group) for group in (params, trained_params)]
        nbytes, itemsize = sum(param.nbytes for param in params), max(2, params[0].element_size())
        return cls(num_weights[0], nbytes, num_weights[1], num_float32, itemsize)


def estimate_model_memory(
    config: TrainingConfig, model: Any, needs: Set[str], max_length: int, images: ImageUse | None = None
) -> dict[str, float]:
    """Estimate the bytes that a run needs for a loaded model, by part."""
    counts, shape = WeightCounts.from_model(model), model.config.get_text_config()
    return estimate_device_bytes(
        config, shape, counts, needs, max_length, measure_loaded_tower(get_causal_lm(model)), images
    )


def estimate_device_bytes(
    config: TrainingConfig, shape: Any, counts: WeightCounts, needs: Set[str], max_length: int,
    tower: TowerShape | None = None, images: ImageUse | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the bytes of each part on a device that learns and samples. `shape` has the attributes of a text config.
    `images` are the images of the run's episodes, by default as many and as large as possible."""
    training, num_learners = config.training, config.compute.learners or 1
    max_staleness = config.optimization.effective_max_staleness
    num_episodes = training.batch_size * count_max_leaves(config)
    num_tokens = min(training.token_budget, num_episodes * max_length)
    sizes = estimate_learner_bytes(config, shape, counts, needs, num_learners, num_tokens)
    if tower is not None:
        images = images or ImageUse.make_largest(config.model.image_tokens)
        sizes |= get_image_bytes(config, tower, images, num_tokens, counts.itemsize)
    if KINDS[training.algorithm].samples:
        if max_staleness or num_learners > 1:  # the sampler of a sharded learner has a full copy
            sizes["the sampler's weights"] = (
                counts.nbytes if num_learners > 1 else counts.itemsize * counts.num_trained
            )
        slots = min(config.sampling.slots, num_episodes * (1 + max_staleness))
        sizes["cache"] = get_cache_bytes(shape, slots, max_length, counts.itemsize)
        if recurrent_bytes := get_state_bytes(shape, slots, counts.itemsize):
            sizes["states"] = recurrent_bytes
    return {part: float(num_bytes) for part, num_bytes in sizes.items()}


def estimate_learner_bytes(
    config: TrainingConfig, shape: Any, counts: WeightCounts, needs: Set[str], learners: int, num_tokens: int
) -> dict[str, float]:
    """Return the bytes on each learner's device, with packs of `num_tokens`. Logits are computed in chunks and not
    counted. A single learner holds the stored weights and float32 copies of the trained ones. Shards of trained weights
    are float32, and two layers and the head at a time are gathered in the compute dtype."""
    embedding_weights = shape.hidden_size * shape.vocab_size
    is_tied = getattr(shape, "tie_word_embeddings", True)  # foreign object
    layer_weights = (counts.num_weights - embedding_weights * (1 if is_tied else 2)) / shape.num_hidden_layers
    gathered_bytes = 0.0 if learners == 1 else counts.itemsize * (2 * layer_weights + embedding_weights)
    stored_bytes = (
        counts.nbytes if learners == 1 else counts.nbytes * (1 - counts.num_trained / counts.num_weights)
    )
    sizes = {
        "weights": stored_bytes / learners + gathered_bytes,
        "float32 copies": 4 * (counts.num_trained - (counts.num_float32 if learners == 1 else 0)) / learners,
        "gradients": 4 * counts.num_trained / learners,
        "optimizer": OPTIMIZER_BYTES[config.training.optimizer] * counts.num_trained / learners,
    }
    resident_bytes = sum(sizes.values()) - gathered_bytes
    is_full_training = not config.lora.enabled and config.model.adapter is None
    if "reference" in needs and "precomputed" not in needs and is_full_training:
        sizes["reference model"] = counts.nbytes / learners
    if "critic" in needs:
        sizes["critic"] = resident_bytes
    training = config.training
    activations = get_activation_bytes(
        shape, num_tokens, training.gradient_checkpointing, counts.itemsize, training.activation_offload
    )
    if learners == 1:  # layer by layer, backward frees activations and adds gradients in the compute dtype
        num_low_precision = counts.num_trained - counts.num_float32
        sizes["gradients"] += max(0, counts.itemsize * num_low_precision - activations)
    layer_gradients = 2 * get_mlp_width(shape) * num_tokens * counts.itemsize  # of the layer in backward
    return sizes | {"activations": float(activations + layer_gradients)}


def get_activation_bytes(
    shape: Any, num_tokens: int, checkpointing: bool, itemsize: int, offload: bool = False
) -> int:
    """Return the bytes of activations that a pack keeps for backward; `shape` is the text config. With `offload`, the
    inputs of two checkpointed layers at a time are on the device, all others in CPU memory. A layer keeps its
    input, its output, both norms, queries, keys and values before and after rotary embedding, the attention output, and
    three times the width of its MLP."""
    mlp_width = get_mlp_width(shape)
    query_width, key_width = get_attention_widths(shape)
    layer_values = 4 * shape.hidden_size + 3 * (query_width + key_width) + 3 * mlp_width
    stored_values = shape.hidden_size if checkpointing else layer_values
    num_layers = min(2, shape.num_hidden_layers) if checkpointing and offload else shape.num_hidden_layers
    return num_tokens * itemsize * (num_layers * stored_values + layer_values * checkpointing)


def get_image_bytes(
    config: TrainingConfig, tower: TowerShape, images: ImageUse, num_tokens: int, itemsize: int
) -> dict[str, float]:
    """Return the bytes that a run's images need: encoded images in the engine's cache and in a pack of `num_tokens`,
    and the activations of the vision tower while it encodes. A frozen tower encodes one image at a time, layer by
    layer. A trained one keeps the layers of all images of the pack for backward."""
    pack_image_tokens = images.token_share * num_tokens  # image tokens
    image_tokens = min(images.tokens_per_image, config.model.image_tokens)
    cached_bytes = min(CACHE_BYTES, images.num_images * image_tokens * tower.num_outputs * itemsize)
    if config.model.train_tower:
        patches, tower_layers = math.ceil(pack_image_tokens * tower.patches), tower
        checkpointing = config.training.gradient_checkpointing
    else:
        patches, tower_layers = math.ceil(image_tokens * tower.patches), tower._replace(num_hidden_layers=1)
        checkpointing = False
    return {
        "encoded images": cached_bytes + pack_image_tokens * tower.num_outputs * itemsize,
        "vision activations": float(get_activation_bytes(tower_layers, patches, checkpointing, itemsize)),
    }


def get_active_experts(shape: Any) -> int:
    """Return the number of experts that compute a token; 0 for a dense model."""
    active_keys = ("num_experts_per_tok", "top_k_experts", "moe_k", "num_experts_per_token")
    total_keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if not any(getattr(shape, name, None) for name in total_keys):  # foreign object
        return 0
    return next((count for name in active_keys if (count := getattr(shape, name, None))), 0)


def get_mlp_width(shape: Any) -> int:
    """Return the MLP width that computes a token; with experts, the total width of its active experts."""
    dense_width: int = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size  # foreign object
    if not (num_active := get_active_experts(shape)):
        return dense_width
    expert = getattr(shape, "moe_intermediate_size", None) or dense_width
    shared_keys = (
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    )
    shared_width = next((width for name in shared_keys if (width := getattr(shape, name, None))), 0)
    return num_active * expert + (shared_width or expert * (getattr(shape, "n_shared_experts", None) or 0))


def get_cache_bytes(shape: Any, num_slots: int, max_length: int, itemsize: int) -> int:
    """Return the bytes of the native engine's KV cache with all slots full; `shape` is the text config."""
    _, key_width = get_attention_widths(shape)
    return 2 * count_kv_layers(shape) * key_width * itemsize * (num_slots + 1) * max_length


def get_state_bytes(shape: Any, num_slots: int, itemsize: int) -> int:
    """Return the bytes of the recurrent layers' states in the native engine: the states of all slots, their snapshots,
    and one row for padding."""
    return ((1 + SNAPSHOTS_PER_SLOT) * num_slots + 1) * get_row_bytes(shape, itemsize)


def get_attention_widths(shape: Any) -> tuple[int, int]:
    """Return a token's total query and key widths over all heads; the mean if the layers differ."""
    if getattr(shape, "is_heterogeneous", False):  # foreign object: the config of a Gemma 4
        widths = [get_attention_widths(layer) for layer in shape.per_layer_config]
        query_width, key_width = (sum(column) // len(widths) for column in zip(*widths, strict=True))
        return query_width, key_width
    num_key_heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads  # foreign object
    head_width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return shape.num_attention_heads * head_width, num_key_heads * head_width


def compute_cache_limit(config: TrainingConfig, model: Any, needs: Set[str], max_length: int) -> int:
    """Return the maximum bytes of a KV cache that shares the device with the learner: `sampling.cache_gib`, or the
    memory that is free at the learner's peak."""
    if config.sampling.cache_gib is not None:
        return int(config.sampling.cache_gib * GIB)
    device = next(model.parameters()).device
    estimate = estimate_model_memory(config, model, needs, max_length)
    peak_bytes = sum(num_bytes for part, num_bytes in estimate.items() if part not in ("cache", "states"))
    allocated_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else estimate["weights"]
    free_memory = get_free_memory(device)
    return int(max(free_memory - max(0.0, peak_bytes - allocated_bytes), MIN_CACHE_SHARE * free_memory))


def get_free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own cache
    return torch.cuda.mem_get_info(device)[0] + cached


def release_models() -> None:
    """Free models that are only referenced in cycles, and torch's cached GPU memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
