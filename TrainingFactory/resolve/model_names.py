"""Models by name, wherever one is named: what a name means, and the bytes that a run was started with.

    qwen3-4b, builtin:tiny              a short name
    Qwen/Qwen3-4B                       a hub id
    ./folder, model.gguf                a model or an adapter on this machine
    sft, runs/sft, sft@step-40          what a run has made; @best and @last too
    agent, agent:3, agent@champion      a registered model: its newest version, another one, the one of an alias

A short name is that model whatever else is called so; where a run and a registered model share a name, it is the
run's: `runs/tiny`, `agent:3` and `agent@champion` say which."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.data.disk import STATE, changed
from TrainingFactory.models.names import BUILTIN, BY_TORCH, SUPPORTED_MODELS, resolve
from TrainingFactory.registry.catalogue import Catalogue, registry_path
from TrainingFactory.registry.lineage import run_node
from TrainingFactory.registry.rows import Version
from TrainingFactory.registry.store import stated_digest
from TrainingFactory.resolve import factories
from TrainingFactory.runs.folder import RunFolder, is_run, list_runs

ADAPTER = "adapter_config.json"
OF_A_RUN = re.compile(r"(?P<run>.+)@(?P<which>step-\d+|best|last)")
ABOUT = "model"  # where a run remembers what it was started from
INHERITED = ("family", "thinking")  # from the run whose model is named, where the config does not say


class Maker(Protocol):
    """What has made a model: a run, or what the registry remembers of one."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> TrainingConfig: ...
    @property
    def about(self) -> dict[str, Any]: ...


@dataclass(slots=True, frozen=True)
class Made:
    """A run as the registry remembers it."""

    name: str
    config: TrainingConfig
    about: dict[str, Any]


@dataclass(slots=True, frozen=True)
class Named:
    """What a name means. `name` is what `load_model` takes: the model, or the one under `adapter`."""

    written: str
    name: str
    adapter: str | None = None
    folder: Path | None = None  # with the files of the model or adapter, where they are on this machine
    maker: Maker | None = None
    version: Version | None = None  # where it is a registered model

    @property
    def section(self) -> dict[str, Any]:
        """Return the keys of the config's section `model` that the name stands for."""
        if self.maker is None:
            return {"name": self.name} | ({"adapter": self.adapter} if self.adapter else {})
        revision = as_started_from(self.maker).model.revision if self.adapter else None
        return {"name": self.name, "adapter": self.adapter, "revision": revision}


def find_model(name: str, runs: str | Path = "runs", registry: str | Path | None = None) -> Named:
    """Return what a name means; raise ValueError, with the nearest name, where it means nothing. `registry` is the
    registry's file, where it is not in the folder of runs."""
    runs, catalogue = Path(runs).expanduser(), Catalogue(registry_path(runs, registry))
    name = factories.model(name) or name
    path, target = Path(name).expanduser(), resolve(name)
    if target == BUILTIN or name.lower() in SUPPORTED_MODELS:
        return Named(name, name)
    if (run := _run(name, runs)) is not None:
        return run
    if (version := catalogue.find(name)) is not None:
        return _registered(name, version, catalogue)
    if path.is_dir():
        return _folder(name, path, runs)
    local = name.startswith((".", "/", "~")) or path.suffix == ".gguf" or path.parent == runs
    if path.suffix == ".gguf" and path.is_file():
        return Named(name, name)
    if name.startswith("package:") or (name.count("/") == 1 and not local):
        return Named(name, name)
    known = [*(run.name for run in list_runs(runs)), *catalogue.names(), *SUPPORTED_MODELS, BUILTIN]
    plain = name.removeprefix(f"{runs}/")
    near = nearest(plain, known, 0.5) or nearest(re.split("[:@]", plain)[0], known, 0.5)
    text = f"there is no such run or model: {name!r}{did_you_mean(near)}"
    raise factories.nowhere("models", name, text)


def with_model(config: TrainingConfig) -> TrainingConfig:
    """Return the config with its model as it is loaded; raise ConfigError where the name means nothing."""
    model, changes = config.model, dict[str, Any]()
    runs, registry = config.logging.output_dir, config.registry.path
    key = "name"
    try:
        found = find_model(model.name, runs, registry)
        changes |= found.section
        if found.maker is not None:
            then = as_started_from(found.maker).model
            said = model.model_fields_set
            inherited = (*INHERITED, "quantization") if found.adapter else INHERITED
            changes |= {name: getattr(then, name) for name in inherited if name not in said}
            if model.revision is not None:
                key = "revision"
                raise ValueError(f"is for models of the hub, and {model.name} was trained here; leave it out")
        if model.adapter is not None:
            key = "adapter"
            if found.adapter is not None:
                raise ValueError(
                    f"model.name is {model.name}, which is an adapter itself; leave this out, or merge that one first: "
                    f"tfactory export {model.name} --out FOLDER --merge"
                )
            over = find_model(model.adapter, runs, registry)
            if over.adapter is None:
                raise ValueError(f"{model.adapter} is a whole model, no adapter; name it as model.name")
            changes["adapter"] = over.adapter
    except ValueError as error:
        raise config.wrong([Problem(("model", key), str(error))]) from error
    return _with_section(config, changes)


def _with_section(config: TrainingConfig, changes: Mapping[str, Any]) -> TrainingConfig:
    model = config.model
    changes = {name: value for name, value in changes.items() if value != getattr(model, name)}
    return config.model_copy(update={"model": model.model_copy(update=changes)}) if changes else config


def about_model(config: TrainingConfig) -> dict[str, Any]:
    """Return what a run remembers of the model that it is started from: as written, the section that was meant, the
    digest of the files, and what made them."""
    meant, found = with_model(config).model, find_model(*_places(config))
    section = {name: value for name, value in meant if value != getattr(config.model, name)}
    for name in ("name", "adapter"):  # found from anywhere
        path = Path(getattr(meant, name) or "").expanduser()
        if getattr(meant, name) and path.exists():
            section[name] = str(path.resolve())
    folder = _started_in(section)
    return {
        "written": config.model.name,
        "meant": section,
        "version": None if found.version is None else str(found.version),
        "digest": None if folder is None or not folder.is_dir() else stated_digest(folder),
        "drawn_by": "integers" if resolve(meant.name) == BUILTIN else None,
        "parent": _node(found),
    }


def _places(config: TrainingConfig) -> tuple[str, str, str | None]:
    return config.model.name, config.logging.output_dir, config.registry.path


def _node(found: Named) -> dict[str, Any] | None:
    """Return the lineage of a model that a run is started from; None for models of others."""
    if found.version is not None:
        return found.version.lineage | {"version": str(found.version)}
    if isinstance(found.maker, RunFolder) and found.folder is not None:
        return run_node(found.maker, found.folder)
    return None


def as_started_from(maker: Maker, config: TrainingConfig | None = None) -> TrainingConfig:
    """Return the config of a run (as it is, or as it was read) with the model section that it was started with."""
    about = maker.about.get(ABOUT) or {}
    started = _with_section(config or maker.config, about.get("meant", {}))
    model = started.model
    if resolve(model.name) == BUILTIN and about.get("drawn_by") is None:  # started before version 0.2
        return _with_section(
            started, {"revision": f"{BY_TORCH}{(model.revision or '0').removeprefix(BY_TORCH)}"}
        )
    return started


def check_started_from(maker: Maker) -> None:
    """Raise where the model that a run was started from is gone, or is not what it was."""
    about = maker.about.get(ABOUT) or {}
    folder, digest, wrong = _started_in(about.get("meant", {})), about.get("digest"), ""
    if folder is not None and not folder.exists():
        wrong = "which is not there any more"
    elif folder is not None and digest is not None and stated_digest(folder) != digest:
        wrong = "which is not any more what it was then"
    if wrong:
        raise ValueError(
            f"run {maker.name} was started from {about['written']}, in {folder}, {wrong}; put it back, or start a new "
            "run"
        )


def _started_in(section: Mapping[str, Any]) -> Path | None:
    """Return the folder whose files a run was started from, by the section that was meant."""
    name = section.get("adapter") or section.get("name")
    return Path(name) if name else None


def _run(name: str, runs: Path) -> Named | None:
    """Return what a run has made, by its name or folder or by one of its checkpoints; None for what is no run."""
    path, at = Path(name).expanduser(), OF_A_RUN.fullmatch(name)
    if path.parent.name == "checkpoints" and path.is_dir() and is_run(path.parent.parent):
        return _checkpoint(name, RunFolder(path.parent.parent), path)
    stem = Path(at["run"] if at else name).expanduser()
    found = next((folder for folder in (runs / stem, stem) if is_run(folder)), None)
    if found is None:
        return None
    run = RunFolder(found)
    return _checkpoint(name, run, chosen_checkpoint(run, at["which"] if at else "last"))


def chosen_checkpoint(run: RunFolder, which: str) -> Path:
    """Return the checkpoint of a run that is asked for: last, step-40, or best, which is the last one where nothing was
    evaluated."""
    checkpoints = run.checkpoints()
    if not checkpoints:
        raise ValueError(f"run {run.name} has no checkpoint yet")
    if which == "best" and (best := run.best()) is not None:
        return best
    if which in ("best", "last"):
        return checkpoints[-1]
    number = int(which.removeprefix("step-"))
    for path in checkpoints:
        if path == run.checkpoint_folder(number):
            return path
    there = ", ".join(path.name for path in checkpoints)
    raise ValueError(f"run {run.name} has no checkpoint of step {number}; there are: {there}")


def _checkpoint(written: str, run: RunFolder, folder: Path) -> Named:
    if wrong := _damaged(folder):
        others = ", ".join(str(path) for path in run.checkpoints() if path != folder)
        raise ValueError(
            f"{folder} is damaged: {', '.join(wrong)}; name another: {others or 'there is none'}"
        )
    if (folder / ADAPTER).is_file():
        return Named(written, as_started_from(run).model.name, str(folder), folder, run)
    return Named(written, str(folder), None, folder, run)


def _damaged(folder: Path) -> list[str]:
    """Return the files of a model that are not as they were written; they are read again only where one changed."""
    files = sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in folder.iterdir())
    return _read_damage(folder, tuple(files))


@functools.lru_cache(64)
def _read_damage(folder: Path, state: tuple[Any, ...]) -> list[str]:
    return changed(folder, but=STATE)


def _registered(written: str, version: Version, catalogue: Catalogue) -> Named:
    folder, node = catalogue.folder(version), version.lineage
    for place in map(catalogue.store.folder, sorted(version.digests)):
        if not place.is_dir() or _damaged(place):
            raise ValueError(f"{version} is damaged: look at it with tfactory registry verify {version}")
    maker = None
    if "config" in node:
        maker = Made(str(version), TrainingConfig(**node["config"]), node["about"])
    if version.base is None:
        return Named(written, str(folder), None, folder, maker, version)
    return Named(written, catalogue.base_name(version), str(folder), folder, maker, version)


def _folder(written: str, path: Path, runs: Path) -> Named:
    """Return the model or adapter in a folder; the latter names its base itself."""
    if (path / "config.json").is_file():
        return Named(written, written, None, path)
    if not (path / ADAPTER).is_file():
        if path.parent == runs:
            RunFolder.find(written, runs)  # raises: a run that lacks a file
        raise ValueError(
            f"model {written!r}: the folder {path} has no config.json, so it holds no model (nor {ADAPTER}, as an "
            "adapter has)"
        )
    base = json.loads((path / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
    return Named(written, str(base), written, path)
