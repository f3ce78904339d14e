"""Keywords of the trainers, and the config sections that they belong to. Their types, for editors and type checkers,
are generated into `keyword_types.pyi`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.names import ALIASES, SHORT_KEYS, expand
from TrainingFactory.config.schema import ALGORITHMS, get_sections

# Names of TRL that trainers accept besides our own; `trl_keywords.py` translates them.
TRL_NAMES = (
    "train_dataset", "eval_dataset", "reward_funcs", "reward_weights", "args", "processing_class", "peft_config",
    "num_generations", "gradient_accumulation_steps", "max_completion_length", "max_prompt_length", "logging_steps",
    "save_steps", "chat_template_kwargs",
)  # fmt: skip


def group_by_section(options: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Move plain keys into their sections: into the algorithm's, else into the one common section that has the key.
    Unknown keys stay where they are, for the config to reject."""
    config = {key: dict(value) if isinstance(value, Mapping) else value for key, value in options.items()}
    config |= {
        key: {SHORT_KEYS[key]: config[key]} for key in SHORT_KEYS if isinstance(config.get(key), str | Path)
    }
    for key in [key for key in config if key not in ALIASES and key not in TrainingConfig.model_fields]:
        section_names = find_sections(key, algorithm)
        if len(section_names) > 1:
            choices = " or ".join(f"{section}={{{key!r}: ...}}" for section in section_names)
            raise ValueError(f"{key} is an option of {' and of '.join(section_names)}; write {choices}")
        if section_names:
            merge_into_section(config, section_names[0], {key: config.pop(key)})
    return config


def find_sections(key: str, algorithm: str) -> list[str]:
    """Return the names of the sections that have a plain key. If the algorithm's own section has it, return only that
    one."""
    all_sections = get_sections()
    if key in all_sections[algorithm].model_fields:
        return [algorithm]
    common_names = all_sections.keys() - set(ALGORITHMS)
    return [
        name for name, section in all_sections.items() if name in common_names and key in section.model_fields
    ]


def merge_into_section(config: dict[str, Any], section: str, options: Mapping[str, Any]) -> None:
    """Add options to a section of a config; raise if one of them is set already."""
    current_options = config.setdefault(section, {})
    if not isinstance(current_options, dict):
        return  # not a section: the config's own error is clearer
    if duplicate_keys := sorted(current_options.keys() & options.keys()):
        raise ValueError(
            f"{', '.join(duplicate_keys)} is given twice, by itself and in {section}; leave one of them out"
        )
    current_options |= options


def with_options(config: TrainingConfig | None, options: dict[str, Any]) -> TrainingConfig:
    """Return the config with the options applied; an option overrides the config's value."""
    config_dict = config.model_dump(exclude_unset=True) if config is not None else {}
    for section, new_options in expand(options).items():
        is_section = isinstance(new_options, Mapping) and isinstance(config_dict.get(section), Mapping)
        config_dict[section] = config_dict[section] | new_options if is_section else new_options
    return TrainingConfig(**config_dict)
