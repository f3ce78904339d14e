"""Options without effect, because their feature is not implemented yet. Commands print a notice for each."""

from __future__ import annotations

from typing import Any

from TrainingFactory.config.schema import TrainingConfig

# key -> (value that describes the present behaviour, notice for any other value)
UNIMPLEMENTED_OPTIONS: dict[str, tuple[Any, str]] = {
    "environment.async_execution": (True, "tools always run while other episodes are sampled"),
}


def list_unimplemented(config: TrainingConfig) -> list[str]:
    """Return one notice per requested feature that is not implemented yet."""
    notices = []
    for key, (default, notice) in UNIMPLEMENTED_OPTIONS.items():
        section_name, option_name = key.split(".")
        section = getattr(config, section_name)
        if option_name in section.model_fields_set and getattr(section, option_name) != default:
            notices.append(f"{key}: {notice}")
    return notices


def list_changes(config: TrainingConfig, section: str) -> list[str]:
    """Return the keys of a section that differ from their defaults (a run's config sets all keys explicitly)."""
    return [f"{section}.{key}" for key in getattr(config, section).model_dump(exclude_defaults=True)]
