"""Dense models by their config.json: how many weights they have, what they compute, and the memory that they take."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from TrainingFactory.apps.plan import memory
from TrainingFactory.apps.plan.memory import Held, cache_bytes
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models.names import resolve

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))

BITS = {"none": 16, "8bit": 8, "4bit": 4.5}  # of a weight of a layer, with its scales


class Shape(NamedTuple):
    """Holds what a config.json says, by its names there."""

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
    def block(self) -> int:  # weights of a layer, without its norms, a thousandth of them
        heads = 2 * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        return self.hidden_size * (heads + 3 * self.intermediate_size)

    @property
    def params(self) -> int:
        ends = self.hidden_size * self.vocab_size * (2 - self.tie_word_embeddings)
        return self.num_hidden_layers * self.block + ends

    def adapter(self, rank: int) -> int:
        """Return the weights of a LoRA adapter on all linear layers: of each, both of its widths."""
        return self.num_hidden_layers * rank * (self.block // self.hidden_size + 7 * self.hidden_size)

    def held(self, config: TrainingConfig) -> Held:
        """Return the weights as a config has them on a GPU: all of them trained, or an adapter over them."""
        bits, layers = BITS[config.model.quantization], self.num_hidden_layers * self.block
        stored = 2 * (self.params - layers) + layers * bits / 8
        if not config.lora.enabled:
            return Held(self.params, stored, self.params, 0, 2)
        own = self.adapter(config.lora.r)
        return Held(self.params + own, stored + 2 * own, own, 0, 2)

    def forward(self, tokens: float, context: float) -> float:
        """Return the operations of the layers for tokens that look back on so many in the mean."""
        looks = 4 * self.num_attention_heads * self.head_dim * context
        return self.num_hidden_layers * tokens * (2 * self.block + looks)


def find_shape(name: str, size: str | None) -> Shape:
    """Return the shape of a size; else of a model: its config.json on this machine, or the size in its name."""
    sizes, path = DATA["shapes"], Path(resolve(name)).expanduser() / "config.json"
    if size is None and path.is_file():
        return _read(name, json.loads(path.read_text(encoding="utf-8")))
    written = [size] if size else [resolve(name), *re.findall(r"\d+(?:\.\d+)?[BM]\b", resolve(name).upper())]
    for each in written:
        if (row := sizes.get(each) or sizes.get(each.upper())) is not None:
            return Shape(*row)
    what = f"--model-size {size}" if size else f"model.name: {name}, which is no folder with a config.json,"
    raise ValueError(f"{what} has no known size; --model-size takes {', '.join(sizes)}")


def dense_shape(name: str, found: dict[str, Any]) -> Shape | None:
    """Return the shape in a loaded model's config; None where it is not that of a dense model."""
    try:
        return _read(name, found)
    except ValueError:
        return None


def _read(name: str, found: dict[str, Any]) -> Shape:
    found = {key: value for key, value in found.get("text_config", found).items() if value is not None}
    heads = found.get("num_attention_heads", 1)
    assumed = {"num_key_value_heads": heads, "head_dim": found.get("hidden_size", 0) // heads}
    found = assumed | {"tie_word_embeddings": False} | found
    if more := [key for key in found if "experts" in key and found[key]]:
        raise ValueError(f"model.name: {name} is a mixture of experts ({more[0]}), which cannot be planned")
    if missing := [key for key in Shape._fields[1:] if key not in found]:
        raise ValueError(f"model.name: config.json of {name} has no {', '.join(missing)}; give --model-size")
    return Shape(name, *(found[key] for key in Shape._fields[1:]))


def learner_bytes(shape: Shape, config: TrainingConfig, needs: Set[str], learners: int) -> dict[str, float]:
    """Return the bytes on each GPU of the learner."""
    return memory.learner_bytes(
        config, shape, shape.held(config), needs, learners, config.training.token_budget
    )


def sampler_bytes(shape: Shape, gpus: int, rows: int, length: float) -> dict[str, float]:
    """Return the bytes on each GPU of a sampler that has so many."""
    return {"weights": 2 * shape.params / gpus, "cache": cache_bytes(shape, rows - 1, 1, 2) * length / gpus}
