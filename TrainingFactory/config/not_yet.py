"""List options without effect, because their feature is not there yet: commands print a notice for each."""

from __future__ import annotations

from typing import Any

from TrainingFactory.config.schema import TrainingConfig

# key -> (the value that says what happens now anyway, what to tell a user who set another one)
NOT_YET: dict[str, tuple[Any, str]] = {
    "environment.async_execution": (True, "tools always run while other episodes are sampled"),
}


def not_yet(config: TrainingConfig) -> list[str]:
    """Return one line for each feature that was asked for and is not there yet."""
    lines = []
    for key, (now, text) in NOT_YET.items():
        section, name = key.split(".")
        holder = getattr(config, section)
        if name in holder.model_fields_set and getattr(holder, name) != now:
            lines.append(f"{key}: {text}")
    return lines


def changed(config: TrainingConfig, section: str) -> list[str]:
    """Return the keys of a section that are not as they are by default: the config of a run has them all written."""
    return [f"{section}.{key}" for key in getattr(config, section).model_dump(exclude_defaults=True)]
