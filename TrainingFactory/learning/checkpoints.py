"""Checkpoints: a folder that loads as a model and also holds everything needed to resume training.

    config.json, model.safetensors, ...     the model as `save_pretrained` writes it (an adapter alone with LoRA)
    tokenizer.json, ...                     its tokenizer
    preprocessor_config.json                the image processor of a model that sees images
    scalar_head.safetensors                 the head of a reward model
    learner/state.safetensors               float32 master weights (policy and critic) and the optimizer states
    learner.json                            identity of the model, and the step counts
    state.json                              the caller's own state, returned on load
    SHA256SUMS                              digests of all files, verified before loading (or by `sha256sum -c`)

The training state has a subfolder because vLLM loads every *.safetensors file in a model's folder as model weights.
A checkpoint is written to a temporary folder and renamed, so a folder with the final name is always complete.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import logging as hf_logging

from TrainingFactory.data.disk import (
    CHECKSUM_FILE,
    TRAINING_STATE_FILES,
    find_modified_files,
    remove_folder,
    sync,
    write_checksums,
)
from TrainingFactory.learning.heads import save_head
from TrainingFactory.learning.learner import Learner

CHECKPOINT_FORMAT = 1
# optimizer class -> bytes of optimizer state per trained weight, after the first step
OPTIMIZER_STATE_BYTES = {"AdamW": 8, "AdamW8bit": 2, "Muon": 4}
Tensors = dict[str, torch.Tensor]


class DamagedCheckpoint(ValueError):
    """The checkpoint's files are missing or corrupt; an older checkpoint may still be intact."""


def count_checkpoint_bytes(learner: Learner) -> tuple[int, int]:
    """Return the size in bytes of a checkpoint's model files, and of its training state."""
    has_adapter = learner.model is not learner.causal_lm
    model_bytes = sum(
        param.numel() * (param.element_size() if has_adapter else learner.dtype.itemsize)
        for param in learner.model.parameters()
        if param.requires_grad or not has_adapter
    )
    state_bytes = 0
    for optimizer in learner.optimizers:
        num_weights = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
        # 4: the float32 master weight.
        state_bytes += num_weights * (4 + OPTIMIZER_STATE_BYTES[type(optimizer).__name__])
    return model_bytes, state_bytes


def save_checkpoint(folder: str | Path, learner: Learner, tokenizer: Any, state: dict[str, Any]) -> None:
    """Write the learner and the JSON-serialisable `state`; rank 0 writes, and all ranks succeed or raise together. On
    failure raise OSError and leave an existing folder as it is."""
    folder = Path(folder)
    model_weights = learner.processes.gather_state(learner.model, learner.dtype)
    state_tensors, optimizer_scalars = _gather_training_state(learner)
    learner_info = {
        "format": CHECKPOINT_FORMAT,
        "steps": learner.steps,
        "model": _describe_identity(learner),
        "optimizers": optimizer_scalars,
    }
    texts = {"learner.json": json.dumps(learner_info, indent=1), "state.json": json.dumps(state, indent=1)}
    partial_folder, error_text = folder.with_name(f".{folder.name}.part"), ""
    try:
        if learner.processes.rank == 0:
            remove_folder(partial_folder)
            partial_folder.mkdir(parents=True)
            _write_checkpoint(partial_folder, learner, tokenizer, model_weights, state_tensors)
            for filename, text in texts.items():
                (partial_folder / filename).write_text(text, encoding="utf-8")
            write_checksums(partial_folder)
            sync(*partial_folder.rglob("*"), partial_folder)
            remove_folder(folder)
            os.rename(partial_folder, folder)
            sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial_folder, ignore_errors=True)
        error_text = getattr(error, "strerror", None) or str(error)
    if error_text := learner.processes.broadcast_text(error_text):
        raise OSError(f"Could not write checkpoint {folder}: {error_text}")


def load_checkpoint(folder: str | Path, learner: Learner) -> dict[str, Any]:
    """Restore the learner and return the caller's `state`. Raise ValueError, with nothing changed, if the checkpoint
    belongs to another model, and DamagedCheckpoint if its files are missing or corrupt."""
    folder = Path(folder)
    if damaged_files := find_modified_files(folder):
        raise DamagedCheckpoint(
            f"{folder} is damaged: missing, or different from {CHECKSUM_FILE}: {', '.join(damaged_files[:3])}"
        )
    learner_info, state = _read_json(folder / "learner.json"), _read_json(folder / "state.json")
    if learner_info.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(
            f"{folder} has format {learner_info.get('format')}; this version reads format {CHECKPOINT_FORMAT}"
        )
    if differences := _describe_differences(learner_info["model"], _describe_identity(learner)):
        raise ValueError(f"{folder} is not a checkpoint of this model: {'; '.join(differences[:3])}")
    state_file = next((folder / name for name in TRAINING_STATE_FILES if (folder / name).exists()), None)
    if state_file is None:
        raise DamagedCheckpoint(
            f"{folder} has weights but no optimizer state (logging.optimizer_state=newest deletes it once a newer "
            f"checkpoint is complete). Start a new run from its weights: model.name={folder}"
        )
    try:
        with safe_open(state_file, "pt") as file:
            _load_optimizers(learner, file, learner_info["optimizers"])
            _load_weights(learner, file)
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"Cannot read {state_file}: {error}") from error
    learner.steps = learner_info["steps"]
    return state


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(
            f"{path.parent} is not a checkpoint: cannot read {path.name}: {error}"
        ) from error


def _write_checkpoint(
    partial_folder: Path, learner: Learner, tokenizer: Any, weights: Tensors | None, tensors: Tensors
) -> None:
    """Write the model's files and the training state; `weights` and `tensors` are gathered, not sharded."""
    hf_logging.disable_progress_bar()  # transformers would draw one per file over the run's own progress
    options = {"save_embedding_layers": False} if learner.model is not learner.causal_lm else {}
    learner.model.save_pretrained(partial_folder, state_dict=weights, **options)
    if weights is not None and not options:  # trained in float32, saved in the dtype in which it was loaded
        learner.causal_lm.config.dtype = learner.dtype
        learner.causal_lm.config.save_pretrained(partial_folder)
    tokenizer.save_pretrained(partial_folder)
    if learner.vision is not None:
        learner.vision.save(partial_folder)
    if learner.head is not None and learner.head.model_info is not None:  # not a critic's head
        head_weights = {name: tensors[f"weight/head.{name}"] for name, _ in learner.head.named_parameters()}
        save_head(partial_folder, learner.head.model_info, head_weights)
    (partial_folder / TRAINING_STATE_FILES[0]).parent.mkdir()
    save_file(tensors, partial_folder / TRAINING_STATE_FILES[0])


def _gather_training_state(learner: Learner) -> tuple[Tensors, list[dict[str, dict[str, Any]]]]:
    """Return master weights and optimizer tensors by name (rank 0 only), and each optimizer's other state values."""
    master_weights, processes = _get_master_weights(learner), learner.processes
    name_by_id = {id(master): name for name, master in master_weights.items()}
    shards: dict[str, torch.Tensor] = {f"weight/{name}": master for name, master in master_weights.items()}
    scalars: list[dict[str, dict[str, Any]]] = []
    for index, optimizer in enumerate(learner.optimizers):
        scalars.append({})
        for param, param_state in optimizer.state.items():
            name = name_by_id[id(param)]
            for key, value in param_state.items():
                if isinstance(value, torch.Tensor):
                    shards[f"optimizer/{index}/{key}/{name}"] = value
                else:
                    scalars[index].setdefault(name, {})[key] = value
    tensors: Tensors = {}
    for name, value in shards.items():
        full_tensor = processes.gather(value.detach())
        if processes.rank == 0:
            tensors[name] = full_tensor.cpu().contiguous()
    return tensors, scalars


def _get_master_weights(learner: Learner) -> dict[str, torch.nn.Parameter]:
    return dict(zip(learner._weights.names, learner._weights.masters, strict=True))


@torch.no_grad()
def _load_weights(learner: Learner, file: Any) -> None:
    for name, master in _get_master_weights(learner).items():
        master.copy_(learner.processes.take_shard(file.get_tensor(f"weight/{name}"), master))
    learner._weights.write_back()


def _load_optimizers(learner: Learner, file: Any, scalars: list[dict[str, dict[str, Any]]]) -> None:
    master_weights = _get_master_weights(learner)
    name_by_id = {id(master): name for name, master in master_weights.items()}
    state_by_parameter: dict[tuple[int, str], dict[str, Any]] = {}
    for tensor_name in file.keys():  # noqa: SIM118  (a safetensors object, not a mapping)
        if tensor_name.startswith("optimizer/"):
            _, index, key, name = tensor_name.split("/", 3)
            tensor = file.get_tensor(tensor_name)
            if tensor.dim():  # a scalar is a step count, which is not sharded
                tensor = learner.processes.take_shard(tensor, master_weights[name])
            state_by_parameter.setdefault((int(index), name), {})[key] = tensor
    for index, optimizer in enumerate(learner.optimizers):
        # torch numbers parameters consecutively over all groups
        params = [param for group in optimizer.param_groups for param in group["params"]]
        states = {}
        for param_index, param in enumerate(params):
            name = name_by_id[id(param)]
            param_state = state_by_parameter.get((index, name), {}) | scalars[index].get(name, {})
            if param_state:
                states[param_index] = param_state
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _describe_identity(learner: Learner) -> dict[str, Any]:
    """Return the properties that a checkpoint and the learner that loads it must share."""
    return {
        "architecture": type(learner.causal_lm).__name__,
        "optimizers": [type(optimizer).__name__ for optimizer in learner.optimizers],
        "trained": {name: list(master.shape) for name, master in _get_master_weights(learner).items()},
        "frozen": learner.frozen_digest,
    }


def _describe_differences(saved_model: dict[str, Any], current_model: dict[str, Any]) -> list[str]:
    if saved_model["architecture"] != current_model["architecture"]:
        return [f"it holds a {saved_model['architecture']}, the model is a {current_model['architecture']}"]
    saved_shapes, model_shapes, differences = saved_model["trained"], current_model["trained"], []
    for name in sorted(saved_shapes | model_shapes):
        saved_shape, shape = (shapes.get(name, "not trained") for shapes in (saved_shapes, model_shapes))
        if saved_shape != shape:
            differences.append(f"{name} is {saved_shape} in it and {shape} in the model")
    if not differences and saved_model["frozen"] != current_model["frozen"]:
        differences.append(
            "the adapter was trained on a base model with other weights (a builtin:tiny run started before version "
            "0.2 resumes only on the processor type that started it)"
        )
    if saved_model["optimizers"] != current_model["optimizers"]:
        names = [" and ".join(identity["optimizers"]) for identity in (saved_model, current_model)]
        differences.append(f"it was trained with {names[0]}, this run uses {names[1]}")
    return differences
