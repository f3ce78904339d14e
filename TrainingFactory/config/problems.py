"""Problems of a config, all reported together, with file, line and the closest valid name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from TrainingFactory.common.options import OptionError, did_you_mean, explain_value, nearest, show_value
from TrainingFactory.config.names import ALIASES, WRONG_GUESSES

COMMAND_LINE = "command line"


@dataclass(slots=True)
class Problem:
    """One problem of a config: `key` is the full path, `value` the invalid value, `location` the file and line."""

    key: tuple[str | int, ...]
    text: str
    value: Any = ...
    location: str = ""

    def __str__(self) -> str:
        key = dotted(self.key)
        value_note = "" if self.value is ... else f" (got {show_value(key, self.value)})"
        return ": ".join(part for part in (self.location, key, self.text + value_note) if part)


@dataclass(slots=True)
class KeyLocations:
    """File and line of each key. Ignored in comparisons: configs with equal values are equal."""

    locations: dict[tuple[str | int, ...], str] = field(default_factory=dict, compare=False)
    default_location: str = field(default="", compare=False)

    def find_location(self, key: tuple[str | int, ...]) -> str:
        """Return the location of a key, or of the innermost located section around it."""
        locations = (
            self.locations[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in self.locations
        )
        return next(locations, self.default_location)

    def make_error(self, problems: Iterable[Problem]) -> ConfigError:
        """Return a ConfigError with the located problems, in the order of the file; the command line comes last."""

        def sort_key(problem: Problem) -> tuple[bool, int]:
            line = problem.location.rpartition(":")[2]
            return problem.location == COMMAND_LINE, int(line) if line.isdecimal() else 0

        located_problems = [
            replace(problem, location=problem.location or self.find_location(problem.key))
            for problem in problems
        ]
        return ConfigError(sorted(located_problems, key=sort_key))


class ConfigError(ValueError):
    """All problems of an invalid config, in one exception."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems:", *lines]))


def list_option_problems(error: OptionError, key: tuple[str | int, ...]) -> list[Problem]:
    """Return the invalid options of the mapping at `key`, as problems of the config."""
    keys = [(*key, *filter(None, option.option.split("."))) for option in error.invalid_options]
    return [
        Problem(full_key, option.text, option.value)
        for full_key, option in zip(keys, error.invalid_options, strict=True)
    ]


def dotted(key: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in key)


def map_fields(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return the field of every dotted key, without an index for keys of list entries."""
    fields: dict[str, Any] = {}
    for name, field_info in model.model_fields.items():
        section = find_section(field_info.annotation)
        fields |= map_fields(section, f"{prefix}{name}.") if section else {prefix + name: field_info}
    return fields


def find_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of a field's type: the type itself, or that of its list entries. None: no section."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def list_problems(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    return [_explain_error(details, root) for details in error.errors(include_url=False)]


def _explain_error(details: ErrorDetails, root: type[BaseModel]) -> Problem:
    key, error_type, value = details["loc"], details["type"], details["input"]
    if error_type == "extra_forbidden" and (full_name := ALIASES.get(dotted(key))):
        return Problem(key, f"is an alias of {full_name}, which is also set; remove one of them", value)
    if error_type == "extra_forbidden" and (alternative := WRONG_GUESSES.get(dotted(key))):
        return Problem(key, f"unknown key; set {alternative}", value)
    if error_type == "extra_forbidden":
        return Problem(key, f"unknown key{did_you_mean(_find_closest_key(key, root))}", value)
    if error_type in ("model_type", "model_attributes_type"):
        section = _find_section_at(key, root)
        return Problem(key, f"must be a section with the keys {', '.join(section.model_fields)}", value)
    if error_type == "missing":
        return Problem(key, "is missing")
    if dotted(key) == "training.algorithm" and (option := _find_algorithm_option(value, root)):
        section = option.partition(".")[0]
        return Problem(key, f"{value} is an option of {section}; set training.algorithm={section} {option}")
    return Problem(key, explain_value(details), value)


def _find_algorithm_option(value: Any, root: type[BaseModel]) -> str | None:
    """Return the option that selects the algorithm `value`, if it is a variant of another one: dpo.loss_kind=orpo."""
    algorithms = get_args(map_fields(root)["training.algorithm"].annotation)
    for full_key, field_info in map_fields(root).items():
        if full_key.partition(".")[0] in algorithms and value in get_args(field_info.annotation):
            return f"{full_key}={value}"
    return None


def _find_section_at(key: tuple[str | int, ...], root: type[BaseModel]) -> type[BaseModel]:
    section = root
    for key_part in key:
        if isinstance(key_part, str) and key_part in section.model_fields:
            section = find_section(section.model_fields[key_part].annotation) or section
    return section


def _find_closest_key(key: tuple[str | int, ...], root: type[BaseModel]) -> str | None:
    """Return the valid key closest to an unknown one: a sibling of similar spelling, else the name in any section."""
    *parents, unknown_key = key
    siblings = _find_section_at(tuple(parents), root).model_fields
    split_aliases = (alias.rpartition(".") for alias in ALIASES)
    aliases = [name for section, _, name in split_aliases if section == dotted(parents)]
    if sibling := nearest(str(unknown_key), [*siblings, *aliases]):
        return dotted([*parents, sibling])
    keys_by_name = {full_key.rsplit(".", 1)[-1]: full_key for full_key in map_fields(root)}
    name = nearest(str(unknown_key), keys_by_name, cutoff=0.8)
    return keys_by_name[name] if name else None
