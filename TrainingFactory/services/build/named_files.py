"""Files that a config names: its Python files and its data. They are looked for in the current folder and beside the
config, and a run that goes on finds them where they were, wherever it is resumed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.user_code import is_file_name, split_name

Section = TypeVar("Section", bound=BaseModel)
Move = Callable[[str], str]  # from the name of a file to the one that is meant
DATA = ("tasks", "dataset", "heldout")
ABOUT = "files"  # where a run remembers them


def read_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainingConfig:
    """`load_config`, with files that are not in the current folder but beside the config found there."""
    config = load_config(path, overrides)
    if path is None:
        return config
    folder = Path(path).parent

    def move(name: str) -> str:
        beside = folder / Path(name).expanduser()
        return str(beside) if not _exists(name) and beside.exists() else name

    return moved(config, move)


def moved(config: TrainingConfig, move: Move) -> TrainingConfig:
    """Return the config with every file that it names moved."""

    def named(name: str) -> str:
        if not is_file_name(name):
            return name
        file, wanted = split_name(name)
        return f"{move(file)}:{wanted}" if wanted else move(file)

    environment, reward = config.environment, config.reward
    data = {key: move(name) for key in DATA if (name := getattr(config.data, key)) is not None}
    tools = [
        _with(entry, name=named(entry.name))
        if entry.config is None
        else _with(entry, config=move(entry.config))
        for entry in config.tools
    ]
    parts = {
        name: part | {"options": _options(part["options"], named)}
        for name, part in reward.parts.items()
        if isinstance(part.get("options"), Mapping)
    }
    return _with(
        config,
        environment=_with(environment, environment_id=(name := environment.environment_id) and named(name)),
        data=_with(config.data, **data),
        tools=tools,
        reward=_with(reward, options=_options(reward.options, named), parts=reward.parts | parts),
    )


def _with(section: Section, **values: Any) -> Section:
    """Return the section with other values; what stays the same is not marked as set."""
    changed = {key: value for key, value in values.items() if value != getattr(section, key)}
    return section.model_copy(update=changed) if changed else section


def _options(options: Mapping[str, Any], named: Move) -> dict[str, Any]:
    found = dict(options)
    if isinstance(function := options.get("function"), str):
        found["function"] = named(function)
    if isinstance(rules := options.get("rules"), Mapping):
        found["rules"] = {
            name: named(rule) if isinstance(rule, str) else rule for name, rule in rules.items()
        }
    return found


def about_files(config: TrainingConfig) -> dict[str, dict[str, str | None]]:
    """Return what a run remembers: where the files are that its config names, and of Python files what is in them."""
    found: dict[str, dict[str, str | None]] = {}

    def note(name: str) -> str:
        if _exists(name):
            path = Path(name).expanduser().resolve()
            found[name] = {"path": str(path), "digest": _digest(path) if name.endswith(".py") else None}
        return name

    moved(config, note)
    return found


def as_then(config: TrainingConfig, about: Mapping[str, Any]) -> TrainingConfig:
    """Return the config of a run, with the files where they were when it started."""
    places = _places(about)
    return moved(config, lambda name: places.get(name, name))


def changed_files(about: Mapping[str, Any]) -> list[str]:
    """Return the Python files that are not any more what they were when the run started."""
    return [
        name
        for name, place in _places(about).items()
        if (was := about[ABOUT][name]["digest"]) is not None
        and _exists(place)
        and was != _digest(Path(place))
    ]


def _places(about: Mapping[str, Any]) -> dict[str, str]:
    """Return where each file is now: where it was, or where that is gone, in the current folder."""
    known = {name: file["path"] for name, file in about.get(ABOUT, {}).items()}
    here = {name for name in known if str(Path(name).expanduser().resolve()) == known[name]}
    return {name: path if name not in here and _exists(path) else name for name, path in known.items()}


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError):  # no name of a file
        return False


def _digest(path: Path) -> str:
    return blake2b(path.expanduser().read_bytes(), digest_size=16).hexdigest()
