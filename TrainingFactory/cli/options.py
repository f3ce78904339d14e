"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter, validators

from TrainingFactory.config import load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.names import full_key

Run = Annotated[str, Parameter(help="The run's name or folder.")]
Where = Annotated[str, Parameter(name="--runs", help="The folder of runs.")]
Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Json = Annotated[bool, Parameter(name="--json", help="Print one JSON object.")]
Overrides = Annotated[str, Parameter(help="Options of the config, as key=value: sampling.top_p=0.9")]


@Parameter(name="*")
@dataclass(slots=True)
class Flags:
    """Holds the options that are set most often; each stands for a key of the config."""

    model: str | None = None
    """Short name, hub id, local folder, GGUF file, run, registered model, or builtin:tiny."""
    tasks: str | None = None
    """A file or hub id of tasks, or a number: so many of the environment's own."""
    split: str | None = None
    """Which of the environment's tasks: train or heldout."""
    group_size: int | None = None
    """Episodes per task; 1 if the config does not say."""
    max_turns: int | None = None
    """Turns after which an episode ends."""
    temperature: float | None = None
    """0 is greedy."""
    max_tokens: int | None = None
    """Longest turn, in tokens."""
    seed: int | None = None
    """For the random numbers of sampling; data.seed=N makes other tasks."""

    def overrides(self) -> list[str]:
        count = self.tasks is not None and self.tasks.removeprefix("-").isdecimal()
        values = {
            "model.name": self.model,
            "data.count": int(self.tasks) if self.tasks and count else None,
            "data.tasks": None if count else self.tasks,
            "data.split": self.split,
            "training.group_size": self.group_size,
            "environment.max_turns": self.max_turns,
            "sampling.temperature": self.temperature,
            "sampling.max_tokens": self.max_tokens,
            "training.seed": self.seed,
        }
        return [key_value(key, value) for key, value in values.items() if value is not None]


def places(overrides: Sequence[str]) -> tuple[str, str | None]:
    """Return the folder of runs and the registry's file that overrides name, for models that are named beside them."""
    keys = ("logging.output_dir", "registry.path")
    config = load_config(
        None, [each for each in overrides if full_key(each.partition("=")[0].strip()) in keys]
    )
    return config.logging.output_dir, config.registry.path
