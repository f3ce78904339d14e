"""Files that a config names, looked for in the current folder and beside the config, and what else a run was started
with: one that goes on finds all of it where it was, wherever it is resumed from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from TrainingFactory.assembly.rewards import reward_model_folder
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.common.user_code import is_file_name, split_name
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.resolve.model_names import ABOUT as STARTED_FROM
from TrainingFactory.resolve.model_names import Maker, about_model
from TrainingFactory.training.dataset import Dataset, Objects

Section = TypeVar("Section", bound=BaseModel)
Move = Callable[[str], str]  # from the name of a file to the one that is meant
DATA = ("tasks", "dataset", "heldout")
ABOUT = "files"  # where a run remembers them


def read_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Return `load_config`, with files that are not in the current folder but beside the config found there."""
    config = load_config(path, overrides)
    return config if path is None else found_beside(config, Path(path).parent)


def found_beside(config: TrainingConfig, folder: Path) -> TrainingConfig:
    """Return the config with files that are not in the current folder but in this one found there."""

    def move(name: str) -> str:
        beside = folder / Path(name).expanduser()
        return str(beside) if not _exists(name) and beside.exists() else name

    return moved(config, move)


def moved(config: TrainingConfig, move: Move) -> TrainingConfig:
    """Return the config with every file that it names moved."""

    def named(name: str) -> str:
        if not is_file_name(name):
            return name
        file, wanted = split_name(name)
        return f"{move(file)}:{wanted}" if wanted else move(file)

    environment, reward = config.environment, config.reward
    data = {key: move(name) for key in DATA if (name := getattr(config.data, key)) is not None}
    tools = [
        _with(entry, name=named(entry.name))
        if entry.config is None
        else _with(entry, config=move(entry.config))
        for entry in config.tools
    ]
    return _with(
        config,
        environment=_with(environment, environment_id=(name := environment.environment_id) and named(name)),
        data=_with(config.data, **data),
        tools=tools,
        reward=_with(reward, options=_inside(reward.options, named), parts=_inside(reward.parts, named)),
    )


def _with(section: Section, **values: Any) -> Section:
    """Return the section with other values; what stays the same is not marked as set."""
    changed = {key: value for key, value in values.items() if value != getattr(section, key)}
    return section.model_copy(update=changed) if changed else section


def _inside(value: Any, named: Move) -> Any:
    if isinstance(value, Mapping):
        return {key: _inside(each, named) for key, each in value.items()}
    return named(value) if isinstance(value, str) else value


def about_files(config: TrainingConfig) -> dict[str, dict[str, str | None]]:
    """Return what a run remembers: where the files are that its config names, and of Python files what is in them."""
    found: dict[str, dict[str, str | None]] = {}

    def note(name: str) -> str:
        if _exists(name):
            path = Path(name).expanduser().resolve()
            found[name] = {"path": str(path), "digest": _digest(path) if name.endswith(".py") else None}
        return name

    moved(config, note)
    return found


def as_then(config: TrainingConfig, about: Mapping[str, Any]) -> TrainingConfig:
    """Return the config of a run, with the files where they were when it started."""
    places = _places(about)
    return moved(config, lambda name: places.get(name, name))


def changed_files(about: Mapping[str, Any]) -> list[str]:
    """Return the Python files that are not any more what they were when the run started."""
    return [
        name
        for name, place in _places(about).items()
        if (was := about[ABOUT][name]["digest"]) is not None
        and _exists(place)
        and was != _digest(Path(place))
    ]


def _places(about: Mapping[str, Any]) -> dict[str, str]:
    """Return where each file is now: where it was, or where that is gone, in the current folder."""
    known = {name: file["path"] for name, file in about.get(ABOUT, {}).items()}
    here = {name for name in known if str(Path(name).expanduser().resolve()) == known[name]}
    return {name: path if name not in here and _exists(path) else name for name, path in known.items()}


def _exists(name: str) -> bool:
    return os.path.exists(os.path.expanduser(name))  # unlike Path's own, False for what cannot name a file


def _digest(path: Path) -> str:
    return blake2b(path.expanduser().read_bytes(), digest_size=16).hexdigest()


def about_start(config: TrainingConfig, objects: Objects, tools: RunTools, found: Dataset) -> dict[str, Any]:
    """Return what a run is started with besides its config, and must find again when it goes on."""
    folder = reward_model_folder(config)
    return {
        "objects": objects.given,
        "replay": tools.replayed,
        "size": found.size,
        "digest": found.digest,
        "reward_model": None if folder is None else str(folder.resolve()),
        ABOUT: about_files(config),
        STARTED_FROM: about_model(config),
    }


def as_started(config: TrainingConfig, run: Maker | None) -> TrainingConfig:
    """Return the config of a run that goes on, with its files and the very reward model that it was started with."""
    if run is None:
        return config
    config, folder = as_then(config, run.about), run.about.get("reward_model")
    if folder is None:
        return config
    if not Path(folder).is_dir():
        raise ValueError(
            f"run {run.name} was started with the reward model in {folder}, which is not there any more; put it back, "
            "or start a new run"
        )
    reward = config.reward.model_copy(update={"model": folder})
    return config.model_copy(update={"reward": reward})
