"""Which model it was that was evaluated, and under which conditions, in digests that stay the same elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from TrainingFactory.assembly.named_files import moved
from TrainingFactory.common.user_code import is_file_name
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ModelSection
from TrainingFactory.data.disk import STATE, file_digest, read_sums
from TrainingFactory.evaluation.records import Conditions, ModelIdentity, digest_of, tasks_digest
from TrainingFactory.models.names import BUILTIN, resolve
from TrainingFactory.registry.store import digest_of as sums_digest
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Task

WEIGHTS = (".safetensors", ".bin", ".gguf")
# Options of a model that change what it says; of sampling those that change only how fast, or the engine's shapes.
SHAPING = ("family", "tools_format", "dtype", "max_length", "thinking", "quantization")
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
    reward = named.reward.model_dump(exclude={"max_unscored", "max_equal_steps"})
    tools = [entry.model_dump() for entry in named.tools]
    if (program := named.environment).command is not None:
        own = [*own, program.command, str(program.options)]
    return Conditions(
        environment=None if place is None else Path(place).name if is_file_name(place) else place,
        tasks=tasks_digest(tasks),
        count=len(tasks),
        seed=config.training.seed,
        episodes=episodes,
        sampling=config.sampling.model_dump(exclude=FREE) | {"max_turns": config.environment.max_turns},
        rest=digest_of(
            [named.environment.system_prompt, reward, named.environment.environment_id, tools, *own]
        ),
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
    known = read_sums(folder)
    files = [path for path in folder.iterdir() if path.suffix in WEIGHTS and path.name not in STATE]
    return f"sha256:{sums_digest({p.name: known.get(p.name) or file_digest(p) for p in files})}"


def _base_digest(model: ModelSection) -> str:
    target, path = resolve(model.name), Path(model.name).expanduser()
    if path.is_dir():
        return weights_digest(path)
    if path.is_file():
        return f"sha256:{file_digest(path)}"
    if target == BUILTIN:
        return f"{BUILTIN}@{model.revision or 0}"
    if target.startswith("package:"):
        return target
    from huggingface_hub import try_to_load_from_cache

    revision = model.revision or "main"
    cached = try_to_load_from_cache(target, "config.json", revision=revision)
    return f"hub:{target}@{Path(cached).parent.name if isinstance(cached, str) else revision}"


def _by_content(name: str) -> str:
    path = Path(name).expanduser()
    return f"{path.name} {file_digest(path)}" if path.is_file() else name
