"""Loader of a validated config, from a YAML file and `key=value` overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.starters import find_create_command
from TrainingFactory.config.names import ALIASES, expand, expand_key
from TrainingFactory.config.problems import COMMAND_LINE, ConfigError, KeyLocations, Problem
from TrainingFactory.config.schema import TrainingConfig

Key = tuple[str | int, ...]
MAX_DEPTH = 50
MAX_VALUES = 100_000  # with aliases expanded: a few lines of nested aliases can expand to billions of values

# libyaml parses six times as fast. `Composer` comes first to replace libyaml's composer, which has no limits.
BASE_LOADERS = (Composer, yaml.CSafeLoader) if yaml.__with_libyaml__ else (yaml.SafeLoader,)
MAX_DIGITS = 100
TAGS = "tag:yaml.org,2002:"
NON_JSON_TAGS = {f"{TAGS}{name}" for name in ("timestamp", "binary", "set", "omap", "pairs")}


class ConfigLoader(*BASE_LOADERS):  # pyright: ignore[reportGeneralTypeIssues]
    """YAML loader restricted to JSON types: unlike in YAML 1.1, 1e-6 is a number, not a string, and 2024-01-31 is a
    string, not a date. Rejects files that expand to too many values."""

    def __init__(self, text: str) -> None:
        try:
            BASE_LOADERS[-1].__init__(self, text)
        except UnicodeEncodeError as error:
            raise yaml.YAMLError(f"character {error.start + 1} is not valid Unicode") from None
        Composer.__init__(self)
        self._depth = self._num_values = 0
        self._anchor_sizes: dict[str, int] = {}  # number of values under each anchor

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, num_values_before = self.peek_event(), self._num_values
        is_alias = isinstance(event, yaml.AliasEvent)
        # An alias to the node that contains it: the node's size is not known yet.
        alias_size = self._anchor_sizes.get(event.anchor, MAX_VALUES if event.anchor in self.anchors else 0)
        self._num_values += alias_size if is_alias else 1
        self._depth += 1
        if self._num_values > MAX_VALUES or self._depth > MAX_DEPTH:
            limits_text = f"at most {MAX_DEPTH} levels and {MAX_VALUES} values, counted with aliases expanded"
            raise yaml.YAMLError(f"too large at line {event.start_mark.line + 1}; allowed are {limits_text}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor and not is_alias:
            self._anchor_sizes[event.anchor] = self._num_values - num_values_before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if node.tag in NON_JSON_TAGS or (node.tag == f"{TAGS}int" and len(node.value) > MAX_DIGITS):
                raise ValueError
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, OverflowError):  # `!!bool abc`, `!!int ""`, `1:59:59...`
            kind = node.tag.removeprefix(TAGS).replace("int", f"an integer of at most {MAX_DIGITS} digits")
            problem = f"cannot parse a value as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


ConfigLoader.yaml_implicit_resolvers = {
    first_char: [(tag, pattern) for tag, pattern in resolvers if tag not in NON_JSON_TAGS]
    for first_char, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
ConfigLoader.add_implicit_resolver(
    f"{TAGS}float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Load a config file (None: the defaults) and apply overrides such as `tools.0.name=search`; raise ConfigError."""
    problems: list[Problem] = []
    locations: dict[Key, str] = {}
    sections = expand(read_yaml(Path(path), locations, problems)) if path is not None else {}
    for override in overrides:
        _apply_override(override, sections, locations, problems)
    key_locations = KeyLocations(locations, str(path) if path is not None else "")
    try:
        config = TrainingConfig(**sections)
        if not problems:
            config._key_locations = key_locations
            return config
    except ConfigError as error:
        problems += error.problems
    raise key_locations.make_error(problems) from None


def key_value(key: str, value: Any) -> str:
    """Format an override for `load_config`."""
    return f"{key}={json.dumps(value)}"  # JSON is unambiguous YAML


def read_yaml(
    path: Path,
    locations: dict[Key, str],
    problems: list[Problem],
    expected_content: str = "sections such as model and environment, written as `model:`",
) -> dict[Any, Any]:
    """Read the mapping in a YAML file. Add the line of every key to `locations`, and duplicate keys to `problems`.
    `expected_content` completes the error "must contain ..." for any other file."""
    try:
        loader = ConfigLoader(path.read_text(encoding="utf-8-sig"))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise _make_file_error(path, f"must contain {expected_content}")
        _locate_keys(node, (), str(path), locations, problems)
        mapping = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        # Not str(error): that quotes the line, which may contain a secret.
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise _make_file_error(path, f"is not valid YAML: {problem}", error.problem_mark) from None
    except FileNotFoundError:
        raise _make_file_error(path, f"file not found{_make_missing_hint(path)}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise _make_file_error(path, f"cannot be read: {str(error).splitlines()[0]}") from None
    for alias, key in ALIASES.items():
        if location := locations.get(tuple(alias.split("."))):
            locations.setdefault(tuple(key.split(".")), location)
    return mapping


def _make_missing_hint(path: Path) -> str:
    if command := find_create_command(path):
        return f"; create it with: {command}"
    closest_name = nearest(path.name, [file.name for file in path.parent.glob("*.y*ml")])
    return did_you_mean(closest_name and str(path.parent / closest_name))


def _make_file_error(path: Path, problem: str, mark: yaml.Mark | None = None) -> ConfigError:
    return ConfigError([Problem((), problem, location=f"{path}:{mark.line + 1}" if mark else str(path))])


def _locate_keys(
    node: yaml.Node, key: Key, path: str, locations: dict[Key, str], problems: list[Problem]
) -> None:
    """Record the line of every key in `locations`, and duplicate keys in `problems`."""
    if isinstance(node, yaml.SequenceNode):
        for index, entry_node in enumerate(node.value):
            locations[(*key, index)] = f"{path}:{entry_node.start_mark.line + 1}"
            _locate_keys(entry_node, (*key, index), path, locations, problems)
    elif isinstance(node, yaml.MappingNode):
        lines_by_key: dict[Key, int] = {}
        for key_node, value_node in node.value:
            inner_key, line = (*key, str(key_node.value)), key_node.start_mark.line + 1
            if inner_key in lines_by_key:
                problem = f"duplicate key in lines {lines_by_key[inner_key]} and {line}; remove one of them"
                problems.append(Problem(inner_key, problem, location=f"{path}:{line}"))
            lines_by_key[inner_key] = line
            locations[inner_key] = f"{path}:{line}"
            _locate_keys(value_node, inner_key, path, locations, problems)


def _apply_override(
    override: str, sections: dict[str, Any], locations: dict[Key, str], problems: list[Problem]
) -> None:
    """Set the value of one `key=value` in the data. The schema reports unknown keys later."""
    name, separator, value_text = override.partition("=")
    if not separator or not name.strip():
        problems.append(Problem((), f"expected key=value, got {override!r}", location=COMMAND_LINE))
        return
    key: Key = tuple(int(part) if part.isdecimal() else part for part in expand_key(name.strip()).split("."))
    try:
        value = yaml.load(value_text, ConfigLoader)  # a SafeLoader
    except yaml.YAMLError:
        problems.append(Problem(key, "the value is not valid YAML; quote it", location=COMMAND_LINE))
        return
    if problem := _set_value(sections, key, value):
        problems.append(Problem(key, problem, location=COMMAND_LINE))
    locations[key] = COMMAND_LINE
    for depth in range(1, len(key)):
        locations.setdefault(key[:depth], COMMAND_LINE)  # a section that only the override created


def _set_value(container: Any, key: Key, value: Any) -> str | None:
    """Set data["a"]["b"] for the key a.b, creating missing sections. Return the problem if that is impossible."""
    key_part: Any = key[0]
    if isinstance(container, list):
        if not isinstance(key_part, int) or key_part > len(container):
            return f"no such list entry; the list has {len(container)} entries, counted from 0"
        if key_part == len(container):
            container.append(None)
    elif isinstance(container, dict):
        key_part = str(key_part)
        container.setdefault(key_part)
    else:
        return "cannot be set, because its parent is not a section"
    if len(key) == 1:
        container[key_part] = value
        return None
    if container[key_part] is None:
        container[key_part] = [] if isinstance(key[1], int) else {}
    return _set_value(container[key_part], key[1:], value)
