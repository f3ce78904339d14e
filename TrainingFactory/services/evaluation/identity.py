"""Which model it was that was evaluated, and under which conditions, in digests that stay the same elsewhere."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ModelSection
from TrainingFactory.data.disk import SUMS
from TrainingFactory.models.names import BUILTIN, resolve
from TrainingFactory.services.build.named_files import moved
from TrainingFactory.services.evaluation.records import Conditions, ModelIdentity, digest_of, tasks_digest
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.types import Task
from TrainingFactory.user_code import is_file_name

WEIGHTS = (".safetensors", ".bin", ".gguf")
LEARNER = "learner.safetensors"  # of a checkpoint: no part of the model
# Options of a model that change what it says; of sampling those that change only how fast, or the engine's shapes.
SHAPING = ("family", "dtype", "max_length", "thinking", "quantization")
FREE = {"slots", "deterministic"}


def identity(
    model: ModelSection, name: str, run: RunFolder | None = None, step: int | None = None, saved: bool = True
) -> ModelIdentity:
    """Return which model that is: its weights by digest, where they are `saved`, and the run and step that made it."""
    options = {key: value for key in SHAPING if (value := getattr(model, key)) is not None}
    about = {} if run is None else {"run": run.name, "run_id": run.about.get("id"), "step": step}
    return ModelIdentity(name=name, digest=model_digest(model) if saved else None, options=options, **about)


def conditions(
    config: TrainingConfig, tasks: Sequence[Task], episodes: int, own: Sequence[str | None] = ()
) -> Conditions:
    """Return what must be the same for another model to be compared; files count by what is in them. `own` tells
    objects that the config does not name."""
    named, place = moved(config, _by_content), config.environment.environment_id
    sampling = config.sampling.model_dump(exclude=FREE) | {"max_turns": config.environment.max_turns}
    rest = [
        named.environment.system_prompt,
        named.reward.model_dump(exclude={"max_unscored", "max_equal_steps"}),
    ]
    rest += [named.environment.environment_id, [entry.model_dump() for entry in named.tools]]
    return Conditions(
        environment=None if place is None else Path(place).name if is_file_name(place) else place,
        tasks=tasks_digest(tasks),
        count=len(tasks),
        seed=config.training.seed,
        episodes=episodes,
        sampling=sampling,
        rest=digest_of([*rest, *own]),
    )


def model_digest(model: ModelSection) -> str:
    """Return a digest of the weights where they are files here, else what tells which they are."""
    base = _base_digest(model)
    if model.adapter is None:
        return base
    adapter = weights_digest(Path(model.adapter).expanduser())
    return f"sha256:{hashlib.sha256(f'{base} {adapter}'.encode()).hexdigest()}"


def weights_digest(folder: Path) -> str:
    """Return the digest of the files of weights in a folder; those of a checkpoint are written down there."""
    known: dict[str, str] = {}
    if (folder / SUMS).is_file():
        lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
        known = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    names = sorted(p.name for p in folder.iterdir() if p.suffix in WEIGHTS and p.name != LEARNER)
    found = [f"{known.get(name) or _file_digest(folder / name)}  {name}\n" for name in names]
    return f"sha256:{hashlib.sha256(''.join(found).encode()).hexdigest()}"


def _base_digest(model: ModelSection) -> str:
    target = resolve(model.name)
    path = Path(model.name).expanduser()
    if path.is_dir():
        return weights_digest(path)
    if path.is_file():
        return f"sha256:{_file_digest(path)}"
    if target == BUILTIN:
        return f"{BUILTIN}@{model.revision or 0}"
    if target.startswith("package:"):
        return target
    return f"hub:{target}@{_commit(target, model.revision or 'main')}"


def _commit(name: str, revision: str) -> str:
    """Return the commit of a model in the local cache of the hub; the revision where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else revision


def _by_content(name: str) -> str:
    path = os.path.expanduser(name)
    return f"{os.path.basename(path)} {_file_digest(Path(path))}" if os.path.isfile(path) else name


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
