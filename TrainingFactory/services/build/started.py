"""What a run was started with, remembered in its folder and found again when it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.services.build import rewards as build_rewards
from TrainingFactory.services.build.named_files import ABOUT, about_files, as_then
from TrainingFactory.services.build.run_tools import RunTools
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.services.training.dataset import Dataset, Objects


def about_start(config: TrainingConfig, objects: Objects, tools: RunTools, found: Dataset) -> dict[str, Any]:
    """Return what a run is started with besides its config, and must find again when it goes on."""
    folder = build_rewards.reward_model_folder(config)
    return {
        "objects": objects.given,
        "replay": tools.replayed,
        "size": found.size,
        "digest": found.digest,
        "reward_model": None if folder is None else str(folder.resolve()),
        ABOUT: about_files(config),
    }


def as_started(config: TrainingConfig, run: RunFolder | None) -> TrainingConfig:
    """Return the config of a run that goes on, with its files where they were and the very reward model that it was
    started with: where a run is named, its last checkpoint may be another one by now."""
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
