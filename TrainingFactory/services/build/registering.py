"""What a run has made goes to the registry, where its config asks for it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.services.model_registry import ModelRegistry
from TrainingFactory.services.registry.rows import check_name


def check_registry(config: TrainingConfig) -> None:
    """Raise where a run that is to be registered could not be: before it has taken a day."""
    asked = config.registry
    if asked.name is not None:
        try:
            check_name(asked.name)
        except ValueError as error:
            raise config.wrong([Problem(("registry", "name"), str(error))]) from error
        ModelRegistry(asked.path, config.logging.output_dir).names()


def register(config: TrainingConfig, run: Path, say: Callable[[str], None]) -> str | None:
    """Register what was made, where the config asks for it. What goes wrong is said; the run is finished."""
    asked, output = config.registry, config.logging.output_dir
    if asked.name is None:
        return None
    made = f"{run}@{asked.checkpoint}"
    try:
        version = ModelRegistry(asked.path, output).register(asked.name, made)
    except (ValueError, OSError) as error:
        at = "" if asked.path is None else f" --registry {asked.path}"
        say(
            f"WARNING the run is finished, and could not be registered: {error}; when that is mended: tfactory "
            f"registry register {asked.name} {shlex.quote(made)} --runs {output}{at}"
        )
        return None
    say(f"registered as {version}")
    return str(version)
