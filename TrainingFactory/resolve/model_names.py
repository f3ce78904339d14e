"""Resolving model names, and checking that a resumed run starts from the same files.

    qwen3-4b, builtin:tiny              short name of a supported model
    Qwen/Qwen3-4B                       Hugging Face id
    ./folder, model.gguf                local model or adapter
    sft, runs/sft, sft@step-40          checkpoint of a run, by default the last; also @best and @last
    agent, agent:3, agent@champion      registered model: newest version, version number, alias
    openai:MODEL, teacher.yaml          model behind an endpoint, for evaluations and teachers

Short names take precedence, then runs, then registered models. `runs/tiny`, `agent:3` and `agent@champion` are
unambiguous."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from TrainingFactory.common.endpoints.names import is_endpoint
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.data.disk import TRAINING_STATE_FILES, find_modified_files
from TrainingFactory.models.names import SUPPORTED_MODELS, TINY_IDS, TORCH_SEED_PREFIX, resolve_model_name
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.registry.lineage import make_run_node
from TrainingFactory.registry.rows import Version
from TrainingFactory.registry.store import read_digest
from TrainingFactory.resolve import factories
from TrainingFactory.runs.folder import RunFolder, is_run, list_runs

ADAPTER = "adapter_config.json"
CHECKPOINT_NAME = re.compile(r"(?P<run>.+)@(?P<checkpoint>step-\d+|best|last)")
MODEL_KEY = "model"  # key of environment.json: the model that the run was started from
# Options inherited from the run that trained the model, unless the config sets them.
INHERITED_OPTIONS = ("family", "thinking")


class TrainedBy(Protocol):
    """The run that trained a model: a `RunFolder`, or its copy in the registry."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> TrainingConfig: ...
    @property
    def run_info(self) -> dict[str, Any]: ...


@dataclass(slots=True, frozen=True)
class RecordedRun:
    """Copy of a run's config and metadata in the registry, which outlives the run."""

    name: str
    config: TrainingConfig
    run_info: dict[str, Any]


@dataclass(slots=True, frozen=True)
class ResolvedModel:
    """A resolved model name; `name` is the model for `load_model`, or the base model of `adapter`."""

    query: str
    name: str
    adapter: str | None = None
    folder: Path | None = None  # files of the model or adapter; None if they are not on this machine
    run: TrainedBy | None = None
    version: Version | None = None  # None if it is not a registered model

    @property
    def section(self) -> dict[str, Any]:
        """Return the keys of the config section `model` that load this model."""
        if self.run is None:
            return {"name": self.name} | ({"adapter": self.adapter} if self.adapter else {})
        revision = with_original_model(self.run).model.revision if self.adapter else None
        return {"name": self.name, "adapter": self.adapter, "revision": revision}


def find_model(name: str, runs: str | Path = "runs", registry: str | Path | None = None) -> ResolvedModel:
    """Resolve a model name; raise ValueError with the closest match if it is unknown. `registry` is the registry's
    file, by default in the folder of runs."""
    runs = Path(runs).expanduser()
    catalogue = Catalogue(get_registry_path(runs, registry))
    name = factories.get_model_target(name) or name
    local_path = Path(name).expanduser()
    if is_endpoint(name) or resolve_model_name(name) in TINY_IDS or name.lower() in SUPPORTED_MODELS:
        return ResolvedModel(name, name)
    if (run := _resolve_run(name, runs)) is not None:
        return run
    if (version := catalogue.find(name)) is not None:
        return _resolve_version(name, version, catalogue)
    if local_path.is_dir():
        return _resolve_folder(name, local_path, runs)
    is_local = name.startswith((".", "/", "~")) or local_path.suffix == ".gguf" or local_path.parent == runs
    if local_path.suffix == ".gguf" and local_path.is_file():
        return ResolvedModel(name, name)
    if name.startswith("package:") or (name.count("/") == 1 and not is_local):
        return ResolvedModel(name, name)
    known_names = [*(run.name for run in list_runs(runs)), *catalogue.names(), *SUPPORTED_MODELS, *TINY_IDS]
    short_name = name.removeprefix(f"{runs}/")
    closest_name = nearest(short_name, known_names, 0.5)
    closest_name = closest_name or nearest(re.split("[:@]", short_name)[0], known_names, 0.5)
    error_text = f"there is no such run or model: {name!r}{did_you_mean(closest_name)}"
    raise factories.make_id_error("models", name, error_text)


def with_resolved_model(config: TrainingConfig) -> TrainingConfig:
    """Return the config with its model section resolved for loading; raise ConfigError if a name is unknown."""
    model, changes = config.model, dict[str, Any]()
    runs, registry = config.logging.output_dir, config.registry.path
    key = "name"
    try:
        resolved_model = find_model(model.name, runs, registry)
        changes |= resolved_model.section
        if resolved_model.run is not None:
            trained_model = with_original_model(resolved_model.run).model
            options = (*INHERITED_OPTIONS, "quantization") if resolved_model.adapter else INHERITED_OPTIONS
            unset_options = [name for name in options if name not in model.model_fields_set]
            changes |= {name: getattr(trained_model, name) for name in unset_options}
            if model.revision is not None:
                key = "revision"
                raise ValueError(f"is only for hub models, but {model.name} was trained here. Remove it")
        if model.adapter is not None:
            key = "adapter"
            if resolved_model.adapter is not None:
                raise ValueError(
                    f"model.name={model.name} is already an adapter. Remove model.adapter, or merge {model.name} "
                    f"first: tfactory export {model.name} --out FOLDER --merge"
                )
            adapter = find_model(model.adapter, runs, registry).adapter
            if adapter is None:
                raise ValueError(f"{model.adapter} is a whole model, not an adapter. Set model.name to it")
            changes["adapter"] = adapter
    except ValueError as error:
        raise config.wrong([Problem(("model", key), str(error))]) from error
    return _with_model_options(config, changes)


def _with_model_options(config: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    model = config.model
    changes = {key: value for key, value in changes.items() if value != getattr(model, key)}
    return config.model_copy(update={"model": model.model_copy(update=changes)}) if changes else config


def describe_provenance(config: TrainingConfig) -> dict[str, Any]:
    """Return the entry of environment.json about the model that a run starts from: its name, the resolved keys of the
    model section, the digest of its files and its lineage."""
    model = with_resolved_model(config).model
    resolved_model = find_model(config.model.name, config.logging.output_dir, config.registry.path)
    section = {name: value for name, value in model if value != getattr(config.model, name)}
    for name in ("name", "adapter"):  # absolute paths, valid from any folder
        path = Path(getattr(model, name) or "").expanduser()
        if getattr(model, name) and path.exists():
            section[name] = str(path.resolve())
    folder = _find_folder(section)
    return {
        "written": config.model.name,
        "meant": section,
        "version": None if resolved_model.version is None else str(resolved_model.version),
        "digest": None if folder is None or not folder.is_dir() else read_digest(folder),
        "drawn_by": "integers" if resolve_model_name(model.name) in TINY_IDS else None,
        "parent": _build_lineage(resolved_model),
    }


def _build_lineage(model: ResolvedModel) -> dict[str, Any] | None:
    """Return the lineage of a model that a run of this project trained; None for other models."""
    if model.version is not None:
        return model.version.lineage | {"version": str(model.version)}
    if isinstance(model.run, RunFolder) and model.folder is not None:
        return make_run_node(model.run, model.folder)
    return None


def with_original_model(run: TrainedBy, config: TrainingConfig | None = None) -> TrainingConfig:
    """Return `config`, by default the run's own, with the model section that the run was started with."""
    provenance = run.run_info.get(MODEL_KEY) or {}
    original_config = _with_model_options(config or run.config, provenance.get("meant", {}))
    model = original_config.model
    # Started before version 0.2.
    if resolve_model_name(model.name) in TINY_IDS and provenance.get("drawn_by") is None:
        revision = f"{TORCH_SEED_PREFIX}{(model.revision or '0').removeprefix(TORCH_SEED_PREFIX)}"
        return _with_model_options(original_config, {"revision": revision})
    return original_config


def check_original_model(run: TrainedBy) -> None:
    """Raise ValueError if the files of the model that a run was started from are missing or changed."""
    provenance = run.run_info.get(MODEL_KEY) or {}
    folder, digest, problem = _find_folder(provenance.get("meant", {})), provenance.get("digest"), ""
    if folder is not None and not folder.exists():
        problem = "is missing"
    elif folder is not None and digest is not None and read_digest(folder) != digest:
        problem = "has changed since"
    if problem:
        raise ValueError(
            f"run {run.name} was started from {provenance['written']}, but {folder} {problem}. Restore it, or start a "
            "new run"
        )


def _find_folder(section: Mapping[str, Any]) -> Path | None:
    """Return the folder that a model section names: the adapter's if it has one, else the model's."""
    name = section.get("adapter") or section.get("name")
    return Path(name) if name else None


def _resolve_run(name: str, runs_folder: Path) -> ResolvedModel | None:
    """Resolve the name or folder of a run, or one of its checkpoints; return None if it is not a run."""
    path, name_match = Path(name).expanduser(), CHECKPOINT_NAME.fullmatch(name)
    if path.parent.name == "checkpoints" and path.is_dir() and is_run(path.parent.parent):
        return _resolve_checkpoint(name, RunFolder(path.parent.parent), path)
    run_path = Path(name_match["run"] if name_match else name).expanduser()
    folder = next((folder for folder in (runs_folder / run_path, run_path) if is_run(folder)), None)
    if folder is None:
        return None
    run = RunFolder(folder)
    checkpoint_name = name_match["checkpoint"] if name_match else "last"
    return _resolve_checkpoint(name, run, find_checkpoint(run, checkpoint_name))


def find_checkpoint(run: RunFolder, checkpoint_name: str) -> Path:
    """Return a checkpoint of a run by name: "last", "step-40" or "best". If the run has no evaluations, "best" is the
    last checkpoint."""
    checkpoints = run.checkpoints()
    if not checkpoints:
        raise ValueError(f"run {run.name} has no checkpoint yet. Wait for the first one, or use another run")
    if checkpoint_name == "best" and (checkpoint := run.best()) is not None:
        return checkpoint
    if checkpoint_name in ("best", "last"):
        return checkpoints[-1]
    step = int(checkpoint_name.removeprefix("step-"))
    for path in checkpoints:
        if path == run.checkpoint_folder(step):
            return path
    names = ", ".join(path.name for path in checkpoints)
    raise ValueError(f"run {run.name} has no checkpoint of step {step}. Existing checkpoints: {names}")


def _resolve_checkpoint(name: str, run: RunFolder, folder: Path) -> ResolvedModel:
    if damaged_files := _find_damaged_files(folder):
        other_checkpoints = ", ".join(str(path) for path in run.checkpoints() if path != folder)
        raise ValueError(
            f"{folder} is damaged: {', '.join(damaged_files)}. Other checkpoints: {other_checkpoints or 'none'}"
        )
    if (folder / ADAPTER).is_file():
        return ResolvedModel(name, with_original_model(run).model.name, str(folder), folder, run)
    return ResolvedModel(name, str(folder), None, folder, run)


def _find_damaged_files(folder: Path) -> list[str]:
    """Return the files of a model that differ from their checksums. The result is cached until a file changes."""
    files = sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir())
    return _find_modified_files(folder, tuple(files))


@functools.lru_cache(64)
def _find_modified_files(folder: Path, file_stats: tuple[Any, ...]) -> list[str]:
    return find_modified_files(folder, ignored=TRAINING_STATE_FILES)


def _resolve_version(name: str, version: Version, catalogue: Catalogue) -> ResolvedModel:
    folder, lineage = catalogue.get_model_folder(version), version.lineage
    for stored_folder in map(catalogue.store.get_model_folder, sorted(version.digests)):
        if not stored_folder.is_dir() or _find_damaged_files(stored_folder):
            raise ValueError(f"{version} is damaged. For details run: tfactory registry verify {version}")
    recorded_run = None
    if "config" in lineage:
        recorded_run = RecordedRun(str(version), TrainingConfig(**lineage["config"]), lineage["about"])
    if version.base is None:
        return ResolvedModel(name, str(folder), None, folder, recorded_run, version)
    return ResolvedModel(name, catalogue.get_base_name(version), str(folder), folder, recorded_run, version)


def _resolve_folder(name: str, path: Path, runs_folder: Path) -> ResolvedModel:
    """Resolve a folder with a model, or with an adapter, whose adapter_config.json names its base model."""
    if (path / "config.json").is_file():
        return ResolvedModel(name, name, None, path)
    if not (path / ADAPTER).is_file():
        if path.parent == runs_folder:
            RunFolder.find(name, runs_folder)  # raises the error for an incomplete run
        raise ValueError(
            f"model {name!r}: the folder {path} has no config.json, as a model has, and no {ADAPTER}, as an adapter "
            "has"
        )
    base_name = json.loads((path / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    return ResolvedModel(name, str(base_name), name, path)
