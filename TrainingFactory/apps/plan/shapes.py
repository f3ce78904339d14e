"""Sizes of dense models from their config.json: number of weights, FLOPs and memory."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from TrainingFactory.assembly import memory
from TrainingFactory.assembly.memory import WeightCounts, cache_bytes
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.names import resolve_model_name

FIGURES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))

BITS = {"none": 16, "8bit": 8, "4bit": 4.5}  # bits per weight of a layer, including quantization scales


class ModelShape(NamedTuple):
    """Dimensions of a dense model, named as in config.json."""

    name: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    @property
    def block(self) -> int:  # weights of a layer without its norms, which are a thousandth of them
        heads = 2 * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        return self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def params(self) -> int:
        ends = self.hidden_size * self.vocab_size * (2 - self.tie_word_embeddings)
        return self.num_hidden_layers * self.block + ends

    def adapter(self, rank: int) -> int:
        """Return the number of weights of a LoRA adapter on all linear layers: rank x (inputs + outputs) of each."""
        return self.num_hidden_layers * rank * (self.block // self.hidden_size + 7 * self.hidden_size)

    def held(self, config: TrainingConfig) -> WeightCounts:
        """Return the weight counts of a config on a GPU: all weights trained, or a LoRA adapter."""
        bits, layers = BITS[config.model.quantization], self.num_hidden_layers * self.block
        stored = 2 * (self.params - layers) + layers * bits / 8
        if not config.lora.enabled:
            return WeightCounts(self.params, stored, self.params, 0, 2)
        adapter = self.adapter(config.lora.r)
        return WeightCounts(self.params + adapter, stored + 2 * adapter, adapter, 0, 2)

    def forward(self, tokens: float, context: float) -> float:
        """Return the FLOPs of the layers for `tokens` tokens with a mean context of `context` tokens."""
        looks = 4 * self.num_attention_heads * self.head_dim * context
        return self.num_hidden_layers * tokens * (2 * self.block + looks)


def find_shape(name: str, size: str | None) -> ModelShape:
    """Return the shape of `size` if given, else of the model: by its local config.json or by the size in its name."""
    sizes, path = FIGURES["shapes"], Path(resolve_model_name(name)).expanduser() / "config.json"
    if size is None and path.is_file():
        return _read(name, json.loads(path.read_text(encoding="utf-8")))
    in_name = re.findall(r"\d+(?:\.\d+)?[BM]\b", resolve_model_name(name).upper())
    for key in [size] if size else [resolve_model_name(name), *in_name]:
        if (row := sizes.get(key) or sizes.get(key.upper())) is not None:
            return ModelShape(*row)
    what = f"--model-size {size}" if size else f"model.name: {name} (not a folder with a config.json)"
    raise ValueError(f"{what}: unknown size; set --model-size to one of {', '.join(sizes)}")


def dense_shape(name: str, config: dict[str, Any]) -> ModelShape | None:
    """Return the shape of a loaded model's config; None if it is not a dense model."""
    try:
        return _read(name, config)
    except ValueError:
        return None


def _read(name: str, config: dict[str, Any]) -> ModelShape:
    config = {key: value for key, value in config.get("text_config", config).items() if value is not None}
    heads = config.get("num_attention_heads", 1)
    assumed = {"num_key_value_heads": heads, "head_dim": config.get("hidden_size", 0) // heads}
    config = assumed | {"tie_word_embeddings": False} | config
    if more := [key for key in config if "experts" in key and config[key]]:
        raise ValueError(f"model.name: {name} is a mixture of experts ({more[0]}), which is not supported")
    if missing := [key for key in ModelShape._fields[1:] if key not in config]:
        raise ValueError(f"model.name: config.json of {name} has no {', '.join(missing)}; set --model-size")
    return ModelShape(name, *(config[key] for key in ModelShape._fields[1:]))


def learner_bytes(
    shape: ModelShape, config: TrainingConfig, needs: Set[str], learners: int
) -> dict[str, float]:
    return memory.learner_bytes(
        config, shape, shape.held(config), needs, learners, config.training.token_budget
    )


def sampler_bytes(shape: ModelShape, gpus: int, rows: int, length: float) -> dict[str, float]:
    """Return the bytes by part on each GPU of a sampler with `gpus` GPUs and `rows` rows of `length` tokens."""
    return {"weights": 2 * shape.params / gpus, "cache": cache_bytes(shape, rows - 1, 1, 2) * length / gpus}
