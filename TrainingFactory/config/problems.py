"""What is wrong with a config, in words: every problem at once, with the place and the nearest right name."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from TrainingFactory.config.names import ALIASES

COMMAND_LINE = "command line"
# What such keys hold, and what looks like this, is never shown. "max_tokens" is a count, not a secret.
_SECRET_KEY = re.compile(r"(?i)(api_?key|secret|passw|credential|(^|_)(token|auth|key)$)")
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|xox[a-z]-)[\w-]{8,}|://[^/\s]*:[^/\s]*@")


@dataclass(slots=True)
class Problem:
    """One thing to mend. `key` is the full path, `value` what stands there, `where` the file and line."""

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
    """Where each key was written. No part of what a config says: two that say the same are equal."""

    found: dict[tuple[str | int, ...], str] = dataclasses.field(default_factory=dict, compare=False)
    otherwise: str = dataclasses.field(default="", compare=False)

    def of(self, key: tuple[str | int, ...]) -> str:
        """The place of a key, or of the nearest section around it."""
        written = (self.found[key[:end]] for end in range(len(key), 0, -1) if key[:end] in self.found)
        return next(written, self.otherwise)

    def error(self, problems: Iterable[Problem]) -> ConfigError:
        """The problems in reading order, each with its place."""
        located = [dataclasses.replace(each, where=each.where or self.of(each.key)) for each in problems]
        return ConfigError(sorted(located, key=_reading_order))


def _reading_order(problem: Problem) -> tuple[bool, int]:
    line = problem.where.rpartition(":")[2]
    return problem.where == COMMAND_LINE, int(line) if line.isdecimal() else 0


class ConfigError(ValueError):
    """The one exception for a wrong config; its text names every problem at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems:", *lines]))


def dotted(key: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in key)


def show(key: str, value: Any) -> str:
    """A value for an error text: short, on one line, and never a secret."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if is_secret(key, value):
        return "***"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | None) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_secret(key: str, value: Any) -> bool:
    return bool(_SECRET_KEY.search(key.rsplit(".", 1)[-1]) or _SECRET_VALUE.search(str(value)))


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most like the word, letter case aside."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Every key of the config with its field; the keys of a list's entries carry no index."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        found |= leaves(section, f"{prefix}{name}.") if section else {prefix + name: field}
    return found


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section behind a field: itself, or the entry of a list of sections."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def explain(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    return [_explain(details, root) for details in error.errors(include_url=False)]


def _explain(details: ErrorDetails, root: type[BaseModel]) -> Problem:
    key, kind, value = details["loc"], details["type"], details["input"]
    if kind == "extra_forbidden" and dotted(key) in ALIASES:
        return Problem(
            key, f"is another name of {ALIASES[dotted(key)]}, which is set as well; keep one", value
        )
    if kind == "extra_forbidden":
        hint = _right_key(key, root)
        return Problem(key, "unknown key" + (f"; did you mean {hint}?" if hint else ""), value)
    if kind in ("model_type", "model_attributes_type"):
        section = _section_at(key, root)
        return Problem(key, f"must be a section with keys {', '.join(section.model_fields)}", value)
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", details["msg"])
        hint = nearest(str(value), choices, cutoff=0.5)
        text = f"must be one of {', '.join(choices)}" + (f"; did you mean {hint}?" if hint else "")
        return Problem(key, text, value)
    if kind == "missing":
        return Problem(key, "is missing")
    return Problem(key, re.sub(r"^Input should be( a valid)?", r"must be\1", details["msg"]), value)


def _section_at(key: tuple[str | int, ...], root: type[BaseModel]) -> type[BaseModel]:
    section = root
    for part in key:
        if isinstance(part, str) and part in section.model_fields:
            section = section_of(section.model_fields[part].annotation) or section
    return section


def _right_key(key: tuple[str | int, ...], root: type[BaseModel]) -> str | None:
    """First a sibling that is spelled like it, then the same name in another section."""
    *parents, last = key
    siblings = _section_at(tuple(parents), root).model_fields
    split = (alias.rpartition(".") for alias in ALIASES)
    aliases = [name for section, _, name in split if section == dotted(parents)]
    if found := nearest(str(last), [*siblings, *aliases]):
        return dotted([*parents, found])
    by_last = {full.rsplit(".", 1)[-1]: full for full in leaves(root)}
    found = nearest(str(last), by_last, cutoff=0.8)
    return by_last[found] if found else None
