"""Say what is wrong with a config: every problem at once, with the place and the nearest right name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from TrainingFactory.common.options import OptionError, did_you_mean, explain_value, nearest, show
from TrainingFactory.config.names import ALIASES, GUESSED

COMMAND_LINE = "command line"


@dataclass(slots=True)
class Problem:
    """Names one thing to mend: `key` is the full path, `value` what stands there, `where` the file and line."""

    key: tuple[str | int, ...]
    text: str
    value: Any = ...
    where: str = ""

    def __str__(self) -> str:
        key = dotted(self.key)
        got = "" if self.value is ... else f" (got {show(key, self.value)})"
        return ": ".join(part for part in (self.where, key, self.text + got) if part)


@dataclass(slots=True)
class Places:
    """Remembers where each key was written. No part of what a config says: two that say the same are equal."""

    found: dict[tuple[str | int, ...], str] = field(default_factory=dict, compare=False)
    otherwise: str = field(default="", compare=False)

    def of(self, key: tuple[str | int, ...]) -> str:
        """Return the place of a key, or of the nearest section around it."""
        written = (self.found[key[:end]] for end in range(len(key), 0, -1) if key[:end] in self.found)
        return next(written, self.otherwise)

    def error(self, problems: Iterable[Problem]) -> ConfigError:
        """Return the problems in reading order, each with its place."""

        def order(problem: Problem) -> tuple[bool, int]:
            line = problem.where.rpartition(":")[2]
            return problem.where == COMMAND_LINE, int(line) if line.isdecimal() else 0

        located = [replace(each, where=each.where or self.of(each.key)) for each in problems]
        return ConfigError(sorted(located, key=order))


class ConfigError(ValueError):
    """Tells every problem of a wrong config at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems:", *lines]))


def option_problems(error: OptionError, key: tuple[str | int, ...]) -> list[Problem]:
    """Return what is wrong with the options that stand at a key."""
    places = [(*key, *filter(None, each.option.split("."))) for each in error.wrong]
    return [Problem(place, each.text, each.value) for place, each in zip(places, error.wrong, strict=True)]


def dotted(key: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in key)


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return every key of the config with its field; the keys of a list's entries carry no index."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        section = section_of(info.annotation)
        found |= leaves(section, f"{prefix}{name}.") if section else {prefix + name: info}
    return found


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section behind a field: itself, or the entry of a list of sections."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def explain(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    return [_explain(details, root) for details in error.errors(include_url=False)]


def _explain(details: ErrorDetails, root: type[BaseModel]) -> Problem:
    key, kind, value = details["loc"], details["type"], details["input"]
    if kind == "extra_forbidden" and (name := ALIASES.get(dotted(key))):
        return Problem(key, f"is another name of {name}, which is set as well; keep one", value)
    if kind == "extra_forbidden" and (instead := GUESSED.get(dotted(key))):
        return Problem(key, f"unknown key; write {instead}", value)
    if kind == "extra_forbidden":
        return Problem(key, f"unknown key{did_you_mean(_right_key(key, root))}", value)
    if kind in ("model_type", "model_attributes_type"):
        section = _section_at(key, root)
        return Problem(key, f"must be a section with keys {', '.join(section.model_fields)}", value)
    if kind == "missing":
        return Problem(key, "is missing")
    if dotted(key) == "training.algorithm" and (option := _option_of_algorithm(value, root)):
        section = option.partition(".")[0]
        return Problem(key, f"{value} is an option of {section}; write training.algorithm={section} {option}")
    return Problem(key, explain_value(details), value)


def _option_of_algorithm(value: Any, root: type[BaseModel]) -> str | None:
    """Return the option that selects what others call an algorithm: dpo.loss_kind=orpo, grpo.advantage=rloo."""
    algorithms = get_args(leaves(root)["training.algorithm"].annotation)
    for full, info in leaves(root).items():
        if full.partition(".")[0] in algorithms and value in get_args(info.annotation):
            return f"{full}={value}"
    return None


def _section_at(key: tuple[str | int, ...], root: type[BaseModel]) -> type[BaseModel]:
    section = root
    for part in key:
        if isinstance(part, str) and part in section.model_fields:
            section = section_of(section.model_fields[part].annotation) or section
    return section


def _right_key(key: tuple[str | int, ...], root: type[BaseModel]) -> str | None:
    """Return a sibling that is spelled like it, else the same name in another section."""
    *parents, last = key
    siblings = _section_at(tuple(parents), root).model_fields
    split = (alias.rpartition(".") for alias in ALIASES)
    aliases = [name for section, _, name in split if section == dotted(parents)]
    if found := nearest(str(last), [*siblings, *aliases]):
        return dotted([*parents, found])
    by_last = {full.rsplit(".", 1)[-1]: full for full in leaves(root)}
    found = nearest(str(last), by_last, cutoff=0.8)
    return by_last[found] if found else None
