"""Sizes of a vision tower, for estimates of memory and time, and the images of a run that they depend on."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from TrainingFactory.common.image_tokens import VIRTUAL, find_images
from TrainingFactory.models.vision import IMAGE_DELIMITERS, QWEN_TYPES, TILED_TYPES, find_tower_parameters


class TowerShape(NamedTuple):
    """Dimensions of a vision tower. The dimensions of a layer have the names of a transformers text config."""

    num_weights: int
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    patches: float  # of a picture for each image token
    num_outputs: int  # values of each image token that the tower returns, deepstack included


class ImageUse(NamedTuple):
    """Size and number of the images in a run's rows, for estimates of memory and time."""

    tokens_per_image: float  # of an image
    token_share: float  # of image tokens among the tokens of a row
    num_images: float  # different images of the whole run

    @classmethod
    def make_largest(cls, image_tokens: int) -> ImageUse:
        """Return the largest possible use: only images of the largest size, and more of them than the cache holds."""
        return cls(image_tokens, 1.0, float("inf"))

    @classmethod
    def measure_rows(cls, rows: Sequence[Sequence[int]], rows_in_run: int) -> ImageUse:
        """Measure the images in these rows of token ids, for a run with `rows_in_run` such rows."""
        images = {tokens.first_id: tokens for row in rows for tokens in find_images(row)}.values()
        image_tokens = sum(token >= VIRTUAL for row in rows for token in row)
        mean_tokens = sum(tokens.num_tokens for tokens in images) / max(1, len(images))
        token_share = image_tokens / max(1, sum(map(len, rows)))
        return cls(mean_tokens, token_share, len(images) * rows_in_run / max(1, len(rows)))


def measure_loaded_tower(model: Any) -> TowerShape | None:
    """Return the vision tower's shape of a loaded model; None if it has no tower or was loaded without it."""
    if getattr(model.config, "vision_config", None) is None:  # foreign object
        return None
    return _make_shape(model.config, sum(weight.numel() for _, weight in find_tower_parameters(model)))


def measure_described_tower(config: Mapping[str, Any]) -> TowerShape | None:
    """Return the vision tower's shape from a model's config.json; None if the model has no tower of a supported
    family."""
    if not config.get("vision_config") or config.get("model_type") not in IMAGE_DELIMITERS:
        return None
    return _measure_config_tower(json.dumps(config, sort_keys=True, default=str))


@functools.cache
def _measure_config_tower(config_json: str) -> TowerShape:
    """Return the tower's shape. Its weights are counted in a model on the meta device, which takes no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    options = json.loads(config_json) | {"audio_config": None}  # never loaded with images
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    return _make_shape(config, sum(weight.numel() for _, weight in find_tower_parameters(model)))


def _make_shape(config: Any, num_weights: int) -> TowerShape:
    vision_config, text_width = config.vision_config, config.get_text_config().hidden_size
    # Qwen 2 VL calls the tower's own width `embed_dim`, and `hidden_size` is the language model's.
    hidden_size = getattr(vision_config, "embed_dim", None) or vision_config.hidden_size
    num_levels = 1 + len(getattr(vision_config, "deepstack_visual_indexes", None) or ())
    return TowerShape(
        num_weights,
        getattr(vision_config, "depth", None) or vision_config.num_hidden_layers,
        hidden_size,
        getattr(vision_config, "intermediate_size", None) or int(hidden_size * vision_config.mlp_ratio),
        getattr(vision_config, "num_heads", None) or vision_config.num_attention_heads,
        _get_patches_per_token(config),
        num_levels * text_width,
    )


def _get_patches_per_token(config: Any) -> float:
    """Return the number of patches of a picture that become one image token."""
    vision_config, model_type = config.vision_config, config.model_type
    if model_type in QWEN_TYPES:
        return vision_config.spatial_merge_size**2
    if model_type in TILED_TYPES:
        return config.scale_factor**2
    if model_type == "internvl":
        return 1 / config.downsample_ratio**2
    if model_type == "gemma4":
        return vision_config.pooling_kernel_size**2
    if model_type == "gemma3":
        return (vision_config.image_size // vision_config.patch_size) ** 2 / config.mm_tokens_per_image
    return 1
