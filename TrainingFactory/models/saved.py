"""Model weights under their checkpoint names, and the check of weight files that another process loads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from TrainingFactory.models.composite import is_composite

Shapes = dict[str, tuple[int, ...]]
WEIGHTS_FILE = "model.safetensors"  # the file in a folder of weights; never sharded


def build_meta_model(config: Any, trust_remote_code: bool = False) -> Any:
    """Build the model of a transformers config on the meta device, without memory for its weights."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class: Any = AutoModelForImageTextToText if is_composite(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return auto_class.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def to_checkpoint_names(meta_model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename weights from module names to checkpoint names, and drop the duplicates of tied weights. `meta_model` is
    built from the config on the meta device, because a loaded model would return the names in the file that it was
    loaded from."""
    from transformers.core_model_loading import revert_weight_conversion

    parameter_names = {name for name, _ in meta_model.named_parameters(remove_duplicate=False)}
    duplicate_names = parameter_names - {name for name, _ in meta_model.named_parameters()}
    unique_weights = {name: weight for name, weight in weights.items() if name not in duplicate_names}
    return revert_weight_conversion(meta_model, unique_weights)


def read_checkpoint_shapes(folder: str, trust_remote_code: bool = False) -> Shapes:
    """Return the checkpoint names and shapes of a model's weights from its config.json, in a folder or on the hub."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    model = build_meta_model(config, trust_remote_code)
    return {
        name: tuple(weight.shape) for name, weight in to_checkpoint_names(model, model.state_dict()).items()
    }


def check_weights(file: Path, shapes: Shapes | None) -> Shapes:
    """Return the names and shapes of the weights in a file. Raise ValueError if they differ from `shapes` (None: do not
    compare) or contain NaN or infinite values, because engines load partial models and sample from NaN silently."""
    try:
        with safe_open(file, "pt") as weights:
            names = list(weights.keys())
            stored_shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in names}
            expected_shapes = stored_shapes if shapes is None else shapes
            for name in sorted(stored_shapes.keys() | expected_shapes.keys()):
                if stored_shapes.get(name) != expected_shapes.get(name):
                    raise ValueError(
                        f"{file} does not contain the model's weights: {name} is "
                        f"{stored_shapes.get(name, 'missing')} in the file and "
                        f"{expected_shapes.get(name, 'missing')} in the model"
                    )
            for name in names:
                if not bool(torch.isfinite(weights.get_tensor(name)).all()):
                    raise ValueError(f"{file}: weight {name} has NaN or infinite values")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return stored_shapes
