"""Files that a config names: searched in the current folder, then beside the config. A run stores their paths, and the
other inputs of its start, so that it can be resumed from any folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from TrainingFactory.assembly.folding import is_template_file
from TrainingFactory.assembly.rewards import find_reward_model_folder
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.common.endpoints.names import SETTINGS_SUFFIXES
from TrainingFactory.common.user_code import is_file_name, split_name
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.resolve.model_names import MODEL_KEY, TrainedBy, describe_provenance
from TrainingFactory.runs.folder import CHAT_TEMPLATE, RunFolder
from TrainingFactory.training.dataset import Dataset, UserObjects

Section = TypeVar("Section", bound=BaseModel)
RenameFile = Callable[[str], str]  # from the name of a file to its new name
DATA_KEYS = ("tasks", "dataset", "heldout")
FILES_KEY = "files"  # key of the run's environment.json


def read_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Load a config. Replace the name of each file that exists only beside the config by its path."""
    config = load_config(path, overrides)
    return config if path is None else with_files_beside(config, Path(path).parent)


def with_files_beside(config: TrainingConfig, folder: Path) -> TrainingConfig:
    """Replace the name of each file that exists in `folder` but not in the current folder by its path."""

    def resolve_beside(file_name: str) -> str:
        candidate = folder / Path(file_name).expanduser()
        return str(candidate) if not _exists(file_name) and candidate.exists() else file_name

    return map_files(config, resolve_beside)


def map_files(config: TrainingConfig, move: RenameFile) -> TrainingConfig:
    """Return the config with `move` applied to each file that it names."""

    def map_name(name: str) -> str:
        if not is_file_name(name):
            return name
        file, attribute = split_name(name)
        return f"{move(file)}:{attribute}" if attribute else move(file)

    environment, reward = config.environment, config.reward
    data_files = {key: move(name) for key in DATA_KEYS if (name := getattr(config.data, key)) is not None}
    tools = [
        _replace_values(tool, name=map_name(tool.name))
        if tool.config is None
        else _replace_values(tool, config=move(tool.config))
        for tool in config.tools
    ]
    template, context, branching = config.model.chat_template, environment.context, config.training.branching
    if context is not None:
        text = context.template
        context = _replace_values(
            context,
            function=context.function and map_name(context.function),
            template=move(text) if text and is_template_file(text) else text,
        )
    if (user := environment.user) is not None:
        instructions = user.template
        user = _replace_values(
            user,
            model=move(user.model) if user.model.endswith(SETTINGS_SUFFIXES) else user.model,
            template=move(instructions) if instructions and is_template_file(instructions) else instructions,
        )
    if branching is not None:
        branching = _replace_values(branching, function=branching.function and map_name(branching.function))
    filters = {map_name(name): action for name, action in config.training.filters.items()}
    return _replace_values(
        config,
        training=_replace_values(config.training, branching=branching, filters=filters),
        model=_replace_values(config.model, chat_template=template and move(template)),
        environment=_replace_values(
            environment,
            environment_id=(name := environment.environment_id) and map_name(name),
            context=context,
            user=user,
        ),
        data=_replace_values(config.data, **data_files),
        tools=tools,
        reward=_replace_values(
            reward, options=_map_values(reward.options, map_name), parts=_map_values(reward.parts, map_name)
        ),
    )


def _replace_values(section: Section, **values: Any) -> Section:
    """Return the section with new values; unchanged keys are not marked as set."""
    updates = {key: value for key, value in values.items() if value != getattr(section, key)}
    return section.model_copy(update=updates) if updates else section


def _map_values(value: Any, map_name: RenameFile) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_values(item, map_name) for key, item in value.items()}
    return map_name(value) if isinstance(value, str) else value


def describe_files(config: TrainingConfig) -> dict[str, dict[str, str | None]]:
    """Return the paths of the config's files, with digests of Python files, for the run to store."""
    files: dict[str, dict[str, str | None]] = {}

    def add_file(name: str) -> str:
        if _exists(name):
            path = Path(name).expanduser().resolve()
            files[name] = {"path": str(path), "digest": _hash_file(path) if name.endswith(".py") else None}
        return name

    map_files(config, add_file)
    return files


def with_original_paths(config: TrainingConfig, run_info: Mapping[str, Any]) -> TrainingConfig:
    """Return a run's config in which each file name is replaced by the file's current path; see
    `_find_present_paths`."""
    present_paths = _find_present_paths(run_info)
    return map_files(config, lambda name: present_paths.get(name, name))


def find_changed_files(run_info: Mapping[str, Any]) -> list[str]:
    """Return the Python files that have changed since the run started."""
    return [
        name
        for name, path in _find_present_paths(run_info).items()
        if (recorded_digest := run_info[FILES_KEY][name]["digest"]) is not None
        and _exists(path)
        and recorded_digest != _hash_file(Path(path))
    ]


def _find_present_paths(run_info: Mapping[str, Any]) -> dict[str, str]:
    """Return the current path of each file: its original path; if that is gone, its name in the current folder."""
    paths = {name: file["path"] for name, file in run_info.get(FILES_KEY, {}).items()}
    unmoved = {name for name in paths if str(Path(name).expanduser().resolve()) == paths[name]}
    return {name: path if name not in unmoved and _exists(path) else name for name, path in paths.items()}


def _exists(file_name: str) -> bool:
    return os.path.exists(os.path.expanduser(file_name))  # unlike Path.exists, False for an invalid file name


def _hash_file(path: Path) -> str:
    return blake2b(path.expanduser().read_bytes(), digest_size=16).hexdigest()


def describe_start(
    config: TrainingConfig, user_objects: UserObjects, tools: RunTools, dataset: Dataset
) -> dict[str, Any]:
    """Return the inputs of a run besides its config that a resume needs."""
    reward_folder = find_reward_model_folder(config)
    return {
        "objects": user_objects.object_names,
        "replay": tools.recording_path,
        "size": dataset.size,
        "digest": dataset.digest,
        "reward_model": None if reward_folder is None else str(reward_folder.resolve()),
        FILES_KEY: describe_files(config),
        MODEL_KEY: describe_provenance(config),
    }


def with_original_files(config: TrainingConfig, run: TrainedBy | None) -> TrainingConfig:
    """Return the config to resume `run` with: its original files, reward model and chat template copy."""
    if run is None:
        return config
    config = with_original_paths(config, run.run_info)
    if isinstance(run, RunFolder) and (template := run.path / CHAT_TEMPLATE).is_file():
        config = _replace_values(config, model=_replace_values(config.model, chat_template=str(template)))
    folder = run.run_info.get("reward_model")
    if folder is None:
        return config
    if not Path(folder).is_dir():
        raise ValueError(
            f"run {run.name} was started with the reward model in {folder}, which does not exist any more; restore it, "
            "or start a new run"
        )
    reward = config.reward.model_copy(update={"model": folder})
    return config.model_copy(update={"reward": reward})
