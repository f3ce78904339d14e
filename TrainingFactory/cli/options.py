"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter, validators

from TrainingFactory.config import load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.names import expand_key

RunName = Annotated[str, Parameter(help="Run name or folder.")]
RunsFolder = Annotated[str, Parameter(name="--runs", help="Folder that contains the runs.")]
Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Json = Annotated[bool, Parameter(name="--json", help="Print the result as one JSON object.")]
Overrides = Annotated[str, Parameter(help="Config overrides as key=value, such as sampling.top_p=0.9.")]


@Parameter(name="*")
@dataclass(slots=True)
class Flags:
    """Short command-line options for the most frequently set config keys."""

    model: str | None = None
    """Model: short name, hub id, local folder, GGUF file, run, registered model, or builtin:tiny."""
    tasks: str | None = None
    """Tasks: a file, a hub id, or a number N for N of the environment's own tasks."""
    split: str | None = None
    """Split of the environment's own tasks: train or heldout."""
    group_size: int | None = None
    """Episodes per task. Default: the config's value, else 1."""
    max_turns: int | None = None
    """Maximum number of turns per episode."""
    temperature: float | None = None
    """Sampling temperature. 0: greedy decoding."""
    max_tokens: int | None = None
    """Maximum number of tokens per turn."""
    seed: int | None = None
    """Random seed for sampling. To get other tasks, set data.seed=N."""

    def list_overrides(self) -> list[str]:
        """Return the options that are set as config overrides (key=value)."""
        is_count = self.tasks is not None and self.tasks.removeprefix("-").isdecimal()
        settings = {
            "model.name": self.model,
            "data.count": int(self.tasks) if self.tasks and is_count else None,
            "data.tasks": None if is_count else self.tasks,
            "data.split": self.split,
            "training.group_size": self.group_size,
            "environment.max_turns": self.max_turns,
            "sampling.temperature": self.temperature,
            "sampling.max_tokens": self.max_tokens,
            "training.seed": self.seed,
        }
        return [key_value(key, value) for key, value in settings.items() if value is not None]


def get_storage_paths(overrides: Sequence[str]) -> tuple[str, str | None]:
    """Return the runs folder and the registry file (None: the default) for resolving model names.

    Both come from the `overrides` of the command, or from the config's defaults."""
    keys = ("logging.output_dir", "registry.path")
    path_overrides = [option for option in overrides if expand_key(option.partition("=")[0].strip()) in keys]
    config = load_config(None, path_overrides)
    return config.logging.output_dir, config.registry.path
