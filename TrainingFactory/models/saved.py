"""A model's weights under the names by which it is saved: what a file for another process holds, and must hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

Shapes = dict[str, tuple[int, ...]]
WEIGHTS = "model.safetensors"  # of a folder of weights: one file, whatever its size


def skeleton(config: Any, trust_remote_code: bool = False) -> Any:
    """Make the model that a transformers config describes, without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def as_saved(bones: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights that have the names of modules under those of a checkpoint, tied ones once. `bones` is the model's
    `skeleton`: one that was loaded is named as the file that it came from."""
    from transformers.core_model_loading import revert_weight_conversion

    every = (name for name, _ in bones.named_parameters(remove_duplicate=False))
    again = set(every) - {name for name, _ in bones.named_parameters()}
    once = {name: weight for name, weight in weights.items() if name not in again}
    return revert_weight_conversion(bones, once)


def saved_shapes(folder: str, trust_remote_code: bool = False) -> Shapes:
    """Return the names and shapes of all weights of the model whose config.json is in a folder, or at a hub id."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    bones = skeleton(config, trust_remote_code)
    return {name: tuple(weight.shape) for name, weight in as_saved(bones, bones.state_dict()).items()}


def check_weights(file: Path, shapes: Shapes | None) -> Shapes:
    """Raise ValueError where a file does not hold exactly the weights of these names and shapes, or numbers that are
    not finite: an engine may load half a model in silence, and sample from NaN as well. Return what it holds."""
    try:
        with safe_open(file, "pt") as weights:
            names = list(weights.keys())
            found = {name: tuple(weights.get_slice(name).get_shape()) for name in names}
            shapes = found if shapes is None else shapes
            for name in sorted(found.keys() | shapes.keys()):
                if (here := found.get(name)) != (wanted := shapes.get(name)):
                    there = f"{here or 'missing'} in it and {wanted or 'missing'} in the model"
                    raise ValueError(f"{file} does not hold the weights of the model: {name} is {there}")
            for name in names:
                if not bool(torch.isfinite(weights.get_tensor(name)).all()):
                    raise ValueError(f"{file} holds numbers that are not finite, in {name}")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return found
