"""Sizes of models from their config.json: number of weights, FLOPs and memory. Dense models are computed from their
dimensions. Weights of other models are counted in a model that is built on the meta device, without memory."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from TrainingFactory.assembly import memory
from TrainingFactory.assembly.memory import (
    WeightCounts,
    get_active_experts,
    get_attention_widths,
    get_cache_bytes,
    get_image_bytes,
    get_mlp_width,
    get_state_bytes,
)
from TrainingFactory.assembly.states import (
    STATE_TYPES,
    RecurrentSizes,
    count_kv_layers,
    count_recurrent_layers,
    measure_recurrent_layer,
)
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.names import SUPPORTED_MODELS, TINY_VL_ID, resolve_model_name
from TrainingFactory.models.tiny import make_builtin_tokenizer, make_tiny_vl_config
from TrainingFactory.models.tower_shape import ImageUse, TowerShape, measure_described_tower

FIGURES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))
MODEL_CONFIGS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("model_configs.yaml").read_text(encoding="utf-8")
)

# Keys of config.json that determine a dense model.
DENSE_MODEL_KEYS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip
# Keys of models whose layers differ in size or have embeddings of their own, such as Gemma 4.
LAYER_KEYS = ("per_layer_config", "global_head_dim", "hidden_size_per_layer_input")
WEIGHT_BITS = {"none": 16, "8bit": 8, "4bit": 4.5}  # of a layer, including quantization scales


class ModelShape(NamedTuple):
    """Dimensions of a model, named as in config.json. `intermediate_size` is the MLP width that computes a token; with
    experts, the total width of all experts that compute it. The counts of weights are 0 for a dense model, because its
    dimensions determine them."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    total_weights: int = 0  # weights
    active_weights: int = 0  # weights that a token passes
    adapter_weights: int = 0  # of a LoRA adapter of rank 1 on all linear layers
    expert_adapter_weights: int = 0  # of one on the experts
    all_linear_has_experts: bool = False
    layer_types: tuple[str, ...] = ()  # empty: every layer has attention
    recurrent: RecurrentSizes = RecurrentSizes()  # of a hybrid
    tower: TowerShape | None = None  # of a model that sees images

    @property
    def embedding_weights(self) -> int:
        """Return the number of weights of the embeddings and the output layer."""
        return self.hidden_size * self.vocab_size * (2 - self.tie_word_embeddings)

    @property
    def layer_weights(self) -> int:
        """Return the number of weights of a layer that compute a token. Norms, a thousandth of the weights, are not
        counted."""
        if self.total_weights:
            return (self.active_weights - self.embedding_weights) // self.num_hidden_layers
        attention_width = 2 * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        return self.hidden_size * (attention_width + 3 * self.intermediate_size)

    @property
    def params(self) -> int:
        return self.total_weights or self.num_hidden_layers * self.layer_weights + self.embedding_weights

    @property
    def active_params(self) -> int:
        """Return the number of weights that compute a token."""
        return self.active_weights or self.params

    def count_adapter(self, rank: int, includes_experts: bool | None = None) -> int:
        """Return the number of weights of a LoRA adapter on all linear layers: rank x (inputs + outputs) for each.
        `includes_experts`: whether it includes the experts."""
        if self.total_weights:
            with_experts = self.all_linear_has_experts if includes_experts is None else includes_experts
            return rank * (self.adapter_weights + with_experts * self.expert_adapter_weights)
        return self.num_hidden_layers * rank * (self.layer_weights // self.hidden_size + 7 * self.hidden_size)

    def count_held(self, config: TrainingConfig) -> WeightCounts:
        """Return the counts of weights that a GPU holds for a config that trains all weights or a LoRA adapter."""
        # Quantization leaves fused experts as they are.
        num_quantizable = self.active_params if self.active_weights < self.total_weights else self.params
        weight_bits = WEIGHT_BITS[config.model.quantization]
        quantized_weights = max(0, num_quantizable - self.embedding_weights)
        tower_weights = 0 if self.tower is None else self.tower.num_weights
        num_weights = self.params + tower_weights
        quantized_bytes = quantized_weights * weight_bits / 8
        stored_bytes = 2 * (self.params - quantized_weights + tower_weights) + quantized_bytes
        trained_tower = tower_weights * config.model.train_tower
        if not config.lora.enabled:
            return WeightCounts(num_weights, stored_bytes, self.params + trained_tower, 0, 2)
        adapter = self.count_adapter(config.lora.r, config.lora.experts)
        return WeightCounts(num_weights + adapter, stored_bytes + 2 * adapter, adapter + trained_tower, 0, 2)

    def count_flops(self, num_tokens: float, context: float) -> float:
        """Return the FLOPs of the layers for `num_tokens` tokens with a mean context of `context` tokens. The cost of a
        recurrent layer does not depend on the context."""
        weight_flops = 2 * self.layer_weights * self.num_hidden_layers
        attention_flops = 4 * self.num_attention_heads * self.head_dim * context * count_kv_layers(self)
        return num_tokens * (
            weight_flops + attention_flops + self.recurrent.flops * count_recurrent_layers(self)
        )

    def count_tower_flops(self, num_tokens: float) -> float:
        """Return the FLOPs of the vision tower for `num_tokens` image tokens, without its attention."""
        return 0.0 if self.tower is None else 2 * self.tower.num_weights * self.tower.patches * num_tokens


def find_shape(name: str, size: str | None) -> ModelShape:
    """Return the shape of `size` if given, else of the model: by its local config.json or by the size in its name."""
    shapes, path = FIGURES["shapes"], Path(resolve_model_name(name)).expanduser() / "config.json"
    if size is None and path.is_file():
        return _shape_from_config(name, json.loads(path.read_text(encoding="utf-8")))
    if size is None and resolve_model_name(name) == TINY_VL_ID:
        tokenizer = make_builtin_tokenizer(TINY_VL_ID)
        return _shape_from_config(TINY_VL_ID, make_tiny_vl_config(tokenizer).to_dict())
    for key in (size, name) if size else (name,):
        if (config := _find_config(key)) is not None:
            return count_shape(key, config)
        if size:
            break
    sizes_in_name = re.findall(r"\d+(?:\.\d+)?[BM]\b", resolve_model_name(name).upper())
    if re.search(r"\d[BM]-A\d", resolve_model_name(name).upper()):
        sizes_in_name = []  # a mixture of experts, and the sizes are those of dense models
    for key in [size] if size else [resolve_model_name(name), *sizes_in_name]:
        if (shape_row := shapes.get(key) or shapes.get(key.upper())) is not None:
            return ModelShape(*shape_row)
    problem = f"--model-size {size}" if size else f"model.name: {name} (not a folder with a config.json)"
    names = [model_name for model_name, hub_id in SUPPORTED_MODELS.items() if hub_id in MODEL_CONFIGS]
    raise ValueError(f"{problem}: unknown size; set --model-size to one of {', '.join([*shapes, *names])}")


def _find_config(name: str) -> dict[str, Any] | None:
    config = MODEL_CONFIGS.get(resolve_model_name(name))
    return None if config is None else {key: value for key, value in config.items() if key != "billions"}


def count_shape(name: str, config: dict[str, Any]) -> ModelShape:
    """Return the shape of a model whose weights are counted in a model on the meta device."""
    return _count_shape(name, json.dumps(config, sort_keys=True, default=str))


@functools.cache
def _count_shape(name: str, config_json: str) -> ModelShape:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from TrainingFactory.learning.lora import count_adapter_weights
    from TrainingFactory.learning.routers import find_expert_modules

    config_dict = json.loads(config_json)
    try:
        config = AutoConfig.for_model(config_dict.pop("model_type"), **config_dict)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"model.name: the config of {name} does not build a model: {error}") from error
    text: Any = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        raise ValueError(f"model.name: {name} has latent attention, which plans and forecasts do not support")
    total_weights = sum(weight.numel() for weight in model.parameters())
    experts = find_expert_modules(model).values()
    expert_weights = sum(weight.numel() for module in experts for weight in module.parameters(recurse=False))
    num_experts = max((module.num_experts for module in experts), default=1)
    idle_weights = expert_weights - expert_weights * get_active_experts(text) // num_experts if experts else 0
    embeddings = [weight for name, weight in model.named_parameters() if "embed_tokens_per_layer" in name]
    idle_weights += sum(table.numel() for table in embeddings)
    query_width, key_width = get_attention_widths(text)  # the mean of the layers
    head_dim = query_width // text.num_attention_heads
    is_tied = bool(getattr(text, "tie_word_embeddings", False))
    return ModelShape(
        name.rpartition("/")[2], text.num_hidden_layers, text.hidden_size, get_mlp_width(text),
        text.num_attention_heads, max(1, key_width // head_dim), head_dim, text.vocab_size, is_tied, total_weights,
        total_weights - idle_weights, *count_adapter_weights(model), *_read_recurrent_sizes(text),
    )  # fmt: skip


def plan_shape(config: TrainingConfig, model_size: str | None) -> ModelShape:
    """Return the shape of a config's model, with its vision tower if `model.vision` is set or the model is the built-in
    vision-language model. Environments and data are not loaded."""
    shape = find_shape(config.model.name, model_size)
    sees_images = config.model.vision or resolve_model_name(config.model.name) == TINY_VL_ID
    if config.model.vision and shape.tower is None:
        raise ValueError(
            f"model.vision: the tower of {shape.name} is unknown; set model.name to a folder with the config.json of a "
            "vision-language model, without --model-size"
        )
    return shape if sees_images else shape._replace(tower=None)


def _read_recurrent_sizes(text_config: Any) -> tuple[tuple[str, ...], RecurrentSizes]:
    """Return the layer types of a hybrid model and the sizes of its recurrent layers; empty values for other models."""
    if not count_recurrent_layers(text_config):
        return (), RecurrentSizes()
    return tuple(text_config.layer_types), measure_recurrent_layer(text_config, 2)


def read_dense_shape(name: str, config: dict[str, Any]) -> ModelShape | None:
    """Return the shape of a dense model from its config; None if its dimensions are not known."""
    try:
        return _shape_from_config(name, config)
    except ValueError:
        return None


def _shape_from_config(name: str, model_config: dict[str, Any]) -> ModelShape:
    text_config: dict[str, Any] = model_config.get("text_config", model_config)
    config = {key: value for key, value in text_config.items() if value is not None}
    num_heads = config.get("num_attention_heads", 1)
    defaults: dict[str, Any] = {
        "num_key_value_heads": num_heads,
        "head_dim": config.get("hidden_size", 0) // num_heads,
    }
    is_tied = bool(model_config.get("tie_word_embeddings"))
    dimensions: dict[str, Any] = defaults | {"tie_word_embeddings": is_tied} | config
    has_experts = any("experts" in key and dimensions[key] for key in dimensions)
    is_plain = not has_experts and not any(dimensions.get(key) for key in LAYER_KEYS)
    is_plain = is_plain and STATE_TYPES.isdisjoint(dimensions.get("layer_types") or ())
    if not is_plain and "model_type" in dimensions:
        return count_shape(name, dimensions)._replace(tower=measure_described_tower(model_config))
    if not is_plain:
        obstacle = "experts" if has_experts else "layers of different kinds"
        raise ValueError(f"model.name: config.json of {name} has {obstacle} but no model_type")
    if missing_keys := [key for key in DENSE_MODEL_KEYS if key not in dimensions]:
        raise ValueError(
            f"model.name: config.json of {name} has no {', '.join(missing_keys)}; set --model-size"
        )
    return ModelShape(
        name, *(dimensions[key] for key in DENSE_MODEL_KEYS), tower=measure_described_tower(model_config)
    )


def estimate_learner_bytes(
    shape: ModelShape, config: TrainingConfig, needs: Set[str], learners: int, images: ImageUse | None = None
) -> dict[str, float]:
    token_budget = config.training.token_budget
    sizes = memory.estimate_learner_bytes(
        config, shape, shape.count_held(config), needs, learners, token_budget
    )
    if shape.tower is not None:
        images = images or ImageUse.make_largest(config.model.image_tokens)
        sizes |= get_image_bytes(config, shape.tower, images, token_budget, 2)
    return sizes


def get_sampler_bytes(shape: ModelShape, gpus: int, rows: int, length: float) -> dict[str, float]:
    """Return the bytes by part on each GPU of a sampler with `gpus` GPUs and `rows` rows of `length` tokens. The
    recurrent states of a hybrid model are counted as in the native engine: the states of each row, its snapshots, and
    one row for padding."""
    cache_bytes = get_cache_bytes(shape, rows - 1, 1, 2) * length
    sizes = {"weights": 2 * shape.params / gpus, "cache": cache_bytes / gpus}
    if count_recurrent_layers(shape):
        sizes["states"] = get_state_bytes(shape, rows, 2) / gpus
    return sizes
