"""Read a checked config from a YAML file and `key=value` overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.config.names import ALIASES, expand, full_key
from TrainingFactory.config.problems import COMMAND_LINE, ConfigError, Places, Problem
from TrainingFactory.config.schema import TrainingConfig

Key = tuple[str | int, ...]
MAX_DEPTH = 50
MAX_VALUES = 100_000  # with every alias written out: a few lines of aliases to aliases can stand for billions


# libyaml parses six times as fast. `Composer` before it takes the place of libyaml's own, which has no limits.
BASES = (Composer, yaml.CSafeLoader) if yaml.__with_libyaml__ else (yaml.SafeLoader,)
MAX_DIGITS = 100
TAGS = "tag:yaml.org,2002:"
NOT_JSON = {f"{TAGS}{name}" for name in ("timestamp", "binary", "set", "omap", "pairs")}


class ConfigLoader(*BASES):  # pyright: ignore[reportGeneralTypeIssues]
    """Reads the types of JSON: 1e-6 is a number, as everybody expects (in YAML 1.1 it is a text), and 2024-01-31 is a
    text (in YAML 1.1 it is a date). Rejects files that are too large to hold."""

    def __init__(self, text: str) -> None:
        try:
            BASES[-1].__init__(self, text)
        except UnicodeEncodeError as error:
            raise yaml.YAMLError(f"character {error.start + 1} is not valid Unicode") from None
        Composer.__init__(self)
        self._depth = self._values = 0
        self._sizes: dict[str, int] = {}  # of what an anchor names

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, before = self.peek_event(), self._values
        alias = isinstance(event, yaml.AliasEvent)
        # The size of what an alias stands in itself is not known yet.
        known = self._sizes.get(event.anchor, MAX_VALUES if event.anchor in self.anchors else 0)
        self._values += known if alias else 1
        self._depth += 1
        if self._values > MAX_VALUES or self._depth > MAX_DEPTH:
            most = f"{MAX_DEPTH} levels and {MAX_VALUES} values, and what an alias names counts each time"
            raise yaml.YAMLError(f"line {event.start_mark.line + 1} is too much: there may be {most}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor and not alias:
            self._sizes[event.anchor] = self._values - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if node.tag in NOT_JSON or (node.tag == f"{TAGS}int" and len(node.value) > MAX_DIGITS):
                raise ValueError
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, OverflowError):  # of `!!bool abc`, `!!int ""`, `1:59:59...`
            kind = node.tag.removeprefix(TAGS).replace("int", f"an integer of at most {MAX_DIGITS} digits")
            problem = f"cannot read a value as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in NOT_JSON]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ConfigLoader.add_implicit_resolver(
    f"{TAGS}float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Read a config file (None: the defaults) and apply overrides such as `tools.0.name=search`; raise ConfigError."""
    problems: list[Problem] = []
    written: dict[Key, str] = {}
    data = expand(read_yaml(Path(path), written, problems)) if path is not None else {}
    for override in overrides:
        _apply(override, data, written, problems)
    places = Places(written, str(path) if path is not None else "")
    try:
        config = TrainingConfig(**data)
        if not problems:
            config._places = places
            return config
    except ConfigError as error:
        problems += error.problems
    raise places.error(problems) from None


def key_value(key: str, value: Any) -> str:
    """Return an override for `load_config`."""
    return f"{key}={json.dumps(value)}"  # JSON is YAML that can be read in one way only


def read_yaml(
    path: Path,
    places: dict[Key, str],
    problems: list[Problem],
    holds: str = "sections such as model and environment, written as `model:`",
) -> dict[Any, Any]:
    """Return what a YAML file holds; `places` gets the line of every key, `problems` keys that stand there twice."""
    try:
        loader = ConfigLoader(path.read_text(encoding="utf-8-sig"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise _wrong(path, f"must hold {holds}")
        _note_places(node, (), str(path), places, problems)
        data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        # Not str(error): that quotes the line, and a secret may stand in it.
        text = " ".join(part for part in (error.context, error.problem) if part)
        raise _wrong(path, f"is not valid YAML: {text}", error.problem_mark) from None
    except FileNotFoundError:
        near = nearest(path.name, [file.name for file in path.parent.glob("*.y*ml")])
        raise _wrong(path, f"there is no such file{did_you_mean(near and str(path.parent / near))}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise _wrong(path, f"cannot be read: {str(error).splitlines()[0]}") from None
    for alias, key in ALIASES.items():
        if written := places.get(tuple(alias.split("."))):
            places.setdefault(tuple(key.split(".")), written)
    return data


def _wrong(path: Path, text: str, mark: yaml.Mark | None = None) -> ConfigError:
    return ConfigError([Problem((), text, where=f"{path}:{mark.line + 1}" if mark else str(path))])


def _note_places(
    node: yaml.Node, key: Key, path: str, places: dict[Key, str], problems: list[Problem]
) -> None:
    """Remember the line of every key, and find keys that are written twice."""
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            places[(*key, index)] = f"{path}:{entry.start_mark.line + 1}"
            _note_places(entry, (*key, index), path, places, problems)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[Key, int] = {}
        for name, value in node.value:
            inner, line = (*key, str(name.value)), name.start_mark.line + 1
            if inner in lines:
                text = f"is written twice, in lines {lines[inner]} and {line}; keep one"
                problems.append(Problem(inner, text, where=f"{path}:{line}"))
            lines[inner] = line
            places[inner] = f"{path}:{line}"
            _note_places(value, inner, path, places, problems)


def _apply(override: str, data: dict[str, Any], places: dict[Key, str], problems: list[Problem]) -> None:
    """Put one `key=value` into the data; whether such a key exists is for the schema to say."""
    written, equals, text = override.partition("=")
    if not equals or not written.strip():
        problems.append(Problem((), f"expected key=value, got {override!r}", where=COMMAND_LINE))
        return
    key: Key = tuple(int(part) if part.isdecimal() else part for part in full_key(written.strip()).split("."))
    try:
        value = yaml.load(text, ConfigLoader)  # a SafeLoader
    except yaml.YAMLError:
        problems.append(Problem(key, "the value is not valid YAML; put it in quotes", where=COMMAND_LINE))
        return
    if wrong := _set(data, key, value):
        problems.append(Problem(key, wrong, where=COMMAND_LINE))
    places[key] = COMMAND_LINE
    for end in range(1, len(key)):
        places.setdefault(key[:end], COMMAND_LINE)  # a section that only the override made


def _set(holder: Any, key: Key, value: Any) -> str | None:
    """Set data["a"]["b"] for the key a.b, making what is missing on the way; return a text if that cannot be."""
    part: Any = key[0]
    if isinstance(holder, list):
        if not isinstance(part, int) or part > len(holder):
            return f"there is no such entry; the list has {len(holder)}, counted from 0"
        if part == len(holder):
            holder.append(None)
    elif isinstance(holder, dict):
        part = str(part)
        holder.setdefault(part)
    else:
        return "what is around it is not a section"
    if len(key) == 1:
        holder[part] = value
        return None
    if holder[part] is None:
        holder[part] = [] if isinstance(key[1], int) else {}
    return _set(holder[part], key[1:], value)
