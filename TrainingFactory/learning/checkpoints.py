"""A learner on disk: a folder that loads as a model, and beside the model all that is needed to train on.

    config.json, model.safetensors, ...     the model as `save_pretrained` writes it (an adapter alone with LoRA)
    tokenizer.json, ...                     its tokenizer
    scalar_head.safetensors                 the head of a reward model
    learner/state.safetensors               trained weights in float32, a critic's too, and the state of the optimisers
    learner.json                            which model this belongs to, and the counts of steps
    state.json                              what the caller wants back
    SHA256SUMS                              digests of all of these, for `sha256sum -c` and before it is loaded

vLLM reads every *.safetensors file of a model's folder as the model's: hence the folder below it for what is not.
It is written aside and renamed, so that a folder with this name is whole, whatever happened meanwhile.
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

from TrainingFactory.data.disk import STATE, SUMS, changed, remove, sync, write_sums
from TrainingFactory.learning.heads import save_head
from TrainingFactory.learning.learner import Learner

FORMAT = 1
# optimizer -> bytes that it remembers of a trained weight, after the first step
REMEMBERED = {"AdamW": 8, "AdamW8bit": 2, "Muon": 4}
Tensors = dict[str, torch.Tensor]


class Damaged(ValueError):
    """A checkpoint is not as it was written; another one may be."""


def checkpoint_bytes(learner: Learner) -> tuple[int, int]:
    """Return the sizes of the model's files in a checkpoint, and of the file that only training needs."""
    adapted = learner.model is not learner.causal
    model = sum(
        param.numel() * (param.element_size() if adapted else learner.dtype.itemsize)
        for param in learner.model.parameters()
        if param.requires_grad or not adapted
    )
    state = 0
    for optimizer in learner.optimizers:
        weights = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
        state += weights * (4 + REMEMBERED[type(optimizer).__name__])  # beside the weight itself, in float32
    return model, state


def save_checkpoint(folder: str | Path, learner: Learner, tokenizer: Any, state: dict[str, Any]) -> None:
    """Write the learner and `state`, which is JSON; raise OSError, with nothing of that name changed, if it fails. Of
    several processes the first writes, and all of them succeed or fail."""
    folder = Path(folder)
    weights = learner.processes.state_of(learner.model, learner.dtype)
    tensors, numbers = _state(learner)
    about = {"format": FORMAT, "steps": learner.steps, "model": _identity(learner), "optimizers": numbers}
    files = {"learner.json": json.dumps(about, indent=1), "state.json": json.dumps(state, indent=1)}
    part, failed = folder.with_name(f".{folder.name}.part"), ""
    try:
        if learner.processes.rank == 0:
            remove(part)
            part.mkdir(parents=True)
            _write(part, learner, tokenizer, weights, tensors)
            for name, content in files.items():
                (part / name).write_text(content, encoding="utf-8")
            write_sums(part)
            sync(*part.rglob("*"), part)
            remove(folder)
            os.rename(part, folder)
            sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        failed = getattr(error, "strerror", None) or str(error)
    if failed := learner.processes.agree(failed):
        raise OSError(f"checkpoint {folder} could not be written: {failed}")


def load_checkpoint(folder: str | Path, learner: Learner) -> dict[str, Any]:
    """Load the learner, return the caller's `state`; ValueError, and nothing changed, where it is another model's, and
    Damaged where it is not what was written."""
    folder = Path(folder)
    if files := changed(folder):
        raise Damaged(f"{folder} is damaged: {', '.join(files[:3])}: missing or not as {SUMS} says")
    about, state = _read_json(folder / "learner.json"), _read_json(folder / "state.json")
    if about.get("format") != FORMAT:
        raise ValueError(f"{folder} was written in format {about.get('format')}; this version reads {FORMAT}")
    if differences := _differences(about["model"], _identity(learner)):
        raise ValueError(f"{folder} is not a checkpoint of this model: {'; '.join(differences[:3])}")
    found = next((folder / name for name in STATE if (folder / name).exists()), None)
    if found is None:
        raise Damaged(
            f"{folder} has weights and no optimizer state, which logging.optimizer_state=newest removes when a newer "
            f"checkpoint is complete; start a new run from its weights: model.name={folder}"
        )
    try:
        with safe_open(found, "pt") as file:
            _load_optimizers(learner, file, about["optimizers"])
            _load_weights(learner, file)
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{found} cannot be read: {error}") from error
    learner.steps = about["steps"]
    return state


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(f"{path.parent} is no checkpoint: {path.name} cannot be read: {error}") from error


def _write(part: Path, learner: Learner, tokenizer: Any, weights: Tensors | None, tensors: Tensors) -> None:
    """Write the files of a model and its learner's state, from whole tensors."""
    hf_logging.disable_progress_bar()  # one for each file that it writes, over whatever the run shows
    adapter = {"save_embedding_layers": False} if learner.model is not learner.causal else {}
    learner.model.save_pretrained(part, state_dict=weights, **adapter)
    if weights is not None and not adapter:  # trained in float32, saved as it was loaded
        learner.causal.config.dtype = learner.dtype
        learner.causal.config.save_pretrained(part)
    tokenizer.save_pretrained(part)
    if learner.head is not None and learner.head.about is not None:  # a critic's says nothing about the model
        names = {name: tensors[f"weight/head.{name}"] for name, _ in learner.head.named_parameters()}
        save_head(part, learner.head.about, names)
    (part / STATE[0]).parent.mkdir()
    save_file(tensors, part / STATE[0])


def _state(learner: Learner) -> tuple[Tensors, list[dict[str, dict[str, Any]]]]:
    """Return the trained weights and what optimisers remember of them, by names: tensors, in the first process alone,
    and numbers."""
    masters, processes = _masters(learner), learner.processes
    names = {id(master): name for name, master in masters.items()}
    found: dict[str, torch.Tensor] = {f"weight/{name}": master for name, master in masters.items()}
    numbers: list[dict[str, dict[str, Any]]] = []
    for index, optimizer in enumerate(learner.optimizers):
        numbers.append({})
        for param, slots in optimizer.state.items():
            name = names[id(param)]
            for key, value in slots.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer/{index}/{key}/{name}"] = value
                else:
                    numbers[index].setdefault(name, {})[key] = value
    tensors: Tensors = {}
    for name, value in found.items():
        whole = processes.whole(value.detach())
        if processes.rank == 0:
            tensors[name] = whole.cpu().contiguous()
    return tensors, numbers


def _masters(learner: Learner) -> dict[str, torch.nn.Parameter]:
    return dict(zip(learner._weights.names, learner._weights.masters, strict=True))


@torch.no_grad()
def _load_weights(learner: Learner, file: Any) -> None:
    for name, master in _masters(learner).items():
        master.copy_(learner.processes.share(file.get_tensor(f"weight/{name}"), master))
    learner._weights.write_back()


def _load_optimizers(learner: Learner, file: Any, numbers: list[dict[str, dict[str, Any]]]) -> None:
    masters = _masters(learner)
    names = {id(master): name for name, master in masters.items()}
    stored: dict[tuple[int, str], dict[str, Any]] = {}
    for full in file.keys():  # noqa: SIM118  (no mapping: safetensors' own object)
        if full.startswith("optimizer/"):
            _, index, key, name = full.split("/", 3)
            value = file.get_tensor(full)
            if value.dim():  # else a count of steps
                value = learner.processes.share(value, masters[name])
            stored.setdefault((int(index), name), {})[key] = value
    for index, optimizer in enumerate(learner.optimizers):
        # torch counts parameters over all groups, in order
        params = [param for group in optimizer.param_groups for param in group["params"]]
        slots = {}
        for number, param in enumerate(params):
            name = names[id(param)]
            found = stored.get((index, name), {}) | numbers[index].get(name, {})
            if found:
                slots[number] = found
        optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})


def _identity(learner: Learner) -> dict[str, Any]:
    """What a checkpoint must have in common with the learner that it is loaded into."""
    return {
        "architecture": type(learner.causal).__name__,
        "optimizers": [type(optimizer).__name__ for optimizer in learner.optimizers],
        "trained": {name: list(master.shape) for name, master in _masters(learner).items()},
        "frozen": learner.frozen,
    }


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    if there["architecture"] != here["architecture"]:
        return [f"it holds a {there['architecture']}, the model is a {here['architecture']}"]
    old, new, found = there["trained"], here["trained"], []
    for name in sorted(old | new):
        if old.get(name) != new.get(name):
            shapes = f"{old.get(name, 'not trained')} in it and {new.get(name, 'not trained')} in the model"
            found.append(f"{name} is {shapes}")
    if not found and there["frozen"] != here["frozen"]:
        found.append(
            "the frozen weights under its adapter differ from those it was trained on (a run over builtin:tiny that "
            "was started before version 0.2 resumes only on the processor type that started it)"
        )
    if there["optimizers"] != here["optimizers"]:
        old, new = " and ".join(there["optimizers"]), " and ".join(here["optimizers"])
        found.append(f"it was trained with {old}, this run uses {new}")
    return found
