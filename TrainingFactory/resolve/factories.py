"""Find what ids mean that only a project knows: in its `factories.yaml`, then in the factories beside this one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from TrainingFactory.common.options import Unknown, did_you_mean, nearest, one_of
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import load_config, read_yaml
from TrainingFactory.config.problems import ConfigError, Places, Problem
from TrainingFactory.config.schema import sections
from TrainingFactory.data.datasets import builtin_dataset, is_path
from TrainingFactory.data.disk import write_aside
from TrainingFactory.resolve.siblings import COMPUTE, DATA, SIBLINGS, Allocation, rows_of
from TrainingFactory.training.dataset import Objects, read_objects

FILE = "factories.yaml"
# kind of id -> the keys of a config that take one; an entry without sections is a value or the section of the first
KINDS = {
    "environments": ("environment.environment_id",),  # first: one may bring ids of the other kinds
    "models": ("model.name",),
    "datasets": ("data.dataset", "data.tasks", "data.heldout"),
    "compute": ("compute.allocation_id",),
}
Entries = dict[str, dict[str, TrainingConfig]]
Say = Callable[[str], None]


def entries() -> Entries:
    """Read the current folder's file: of each kind the ids, each with the part of a config that it stands for."""
    path = Path(FILE)
    found: Entries = {kind: {} for kind in KINDS}
    if not path.is_file():
        return found
    places: dict[tuple[str | int, ...], str] = {}
    problems: list[Problem] = []
    for kind, ids in read_yaml(path, places, problems).items():
        if kind not in KINDS:
            problems.append(Problem((str(kind),), one_of(kind, KINDS)))
        elif not isinstance(ids, Mapping | None):
            problems.append(Problem((kind,), "must hold ids, each with what it leads to", ids))
        else:
            for name, value in (ids or {}).items():
                try:
                    found[kind][str(name)] = as_config(kind, value)
                except ConfigError as error:
                    for each in error.problems:
                        inner = each.key if isinstance(value, Mapping) else ()
                        problems.append(dataclasses.replace(each, key=(kind, str(name), *inner)))
    text = "leads to {!r}, which is an id here itself; write what that one leads to"
    for kind, ids in found.items():
        targets = {name: leads_to(kind, config) for name, config in ids.items()}
        twice = {name: target for name, target in targets.items() if target != name and target in ids}
        problems += [Problem((kind, name), text.format(target)) for name, target in twice.items()]
    if problems:
        raise Places(places, FILE).error(problems)
    return found


def add(kind: str, name: str, target: Sequence[str]) -> None:
    """Write an entry into the file, whose comments stay: `target` is what the id leads to, or key=value for several."""
    section, _ = _split(KINDS[kind][0])
    value: Any = target[0]
    if all("=" in each for each in target):
        keys = [each if "." in each.partition("=")[0] else f"{section}.{each}" for each in target]
        value = load_config(None, keys).model_dump(exclude_unset=True)
    elif len(target) > 1:
        raise ValueError(f"{' '.join(target)}: give one target, or several as key=value")
    if name in entries()[kind]:
        raise ValueError(f"{FILE} has {kind}.{name} already; edit it there")
    path = Path(FILE)
    before = path.read_text(encoding="utf-8").rstrip() + "\n" if path.is_file() else ""
    entry = f"{json.dumps(name)}: {json.dumps(value)}\n"
    if head := re.search(rf"^{kind}:[ \t]*(?:#.*)?\n([ \t]*)", before, re.MULTILINE):
        after = f"{before[: head.start(1)]}{head[1] or '  '}{entry}{before[head.start(1) :]}"
    else:
        after = f"{before}{kind}:\n  {entry}"
    write_aside(path, after)
    try:
        entries()
    except ValueError:
        write_aside(path, before) if before else path.unlink()
        raise


def as_config(kind: str, value: Any) -> TrainingConfig:
    """Return the part of a config that an entry stands for: a text, the keys of one section, or several sections."""
    section, key = _split(KINDS[kind][0])
    if not isinstance(value, Mapping):
        value = {key: value}
    if not value.keys() & {"tools", *sections()}:
        value = {section: dict(value)}
    config = TrainingConfig(**value)
    if leads_to(kind, config) is None and not (kind == "environments" and config.tools):
        example = "be a mapping such as {num_gpus: 8}" if kind == "compute" else f"say the {section}'s {key}"
        raise ConfigError([Problem((), f"must {example}")])
    return config


def leads_to(kind: str, config: TrainingConfig) -> str | None:
    """Return what an entry means in one line; None for an environment that is nothing but its tools."""
    if kind == "compute":
        section = config.compute
        gpus = "all GPUs" if section.num_gpus is None else f"{section.num_gpus} GPUs"
        return None if section.allocation_id else f"{gpus} of {section.backend}"
    parts = [(getattr(config, section), key) for section, key in map(_split, KINDS[kind])]
    return next((getattr(part, key) for part, key in parts if key in part.model_fields_set), None)


def _split(key: str) -> tuple[str, str]:
    section, _, name = key.partition(".")
    return section, name


def model(name: str) -> str | None:
    """Return the model that a name leads to in the project's file; None where it is not in it."""
    entry = entries()["models"].get(name)
    return None if entry is None else entry.model.name


def by_file(config: TrainingConfig, say: Say = lambda _: None) -> TrainingConfig:
    """Return the config with what the project's file says for its ids; other keys of an entry fill what is not set."""
    known = entries()
    for kind, keys in KINDS.items():
        for full in keys:
            section, key = _split(full)
            name = getattr(getattr(config, section), key)
            if name not in known[kind]:
                continue
            entry = known[kind][name]
            target = leads_to(kind, entry)
            config = _filled(config, entry, keys)
            if kind != "compute":  # a run that goes on asks for its machines again
                config = _with(config, section, {key: target})
            say(f"{full} {name} is {target or 'a conversation with tools'} ({FILE})")
    return config


def _filled(config: TrainingConfig, entry: TrainingConfig, ids: Sequence[str]) -> TrainingConfig:
    """Return the config with those keys of an entry that it does not set itself, without the ids."""
    for name in entry.model_fields_set:
        mine, theirs = getattr(config, name), getattr(entry, name)
        if isinstance(theirs, BaseModel):
            missing = theirs.model_fields_set - mine.model_fields_set
            given = {key: getattr(theirs, key) for key in missing if f"{name}.{key}" not in ids}
            config = _with(config, name, given)
        elif name not in config.model_fields_set:
            config = config.model_copy(update={name: theirs})
    return config


def _with(config: TrainingConfig, section: str, keys: Mapping[str, Any]) -> TrainingConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=dict(keys))})


def with_rows(config: TrainingConfig, given: Objects, say: Say = lambda _: None) -> Objects:
    """Return the objects with the rows of datasets that a DataFactory knows; files and what is handed in as objects
    are left alone. `say` is called with what each id is."""
    data, found = config.data, dataclasses.replace(given)
    measured = (
        given.heldout is None and given.heldout_tasks is None and config.training.eval_every is not None
    )
    wanted = {"tasks": given.tasks is None, "dataset": given.examples is None, "heldout": measured}
    rows = {key: _rows(key, getattr(data, key), say) if read else None for key, read in wanted.items()}
    read_objects(config, found, **rows)
    return found


def _rows(key: str, name: str | None, say: Say) -> Any:
    if name is None or is_path(name) or Path(name).exists():
        return None
    if (known := DATA.ask(name)) is not None:
        say(f"data.{key} {name} is a dataset of {DATA.package}")
        return rows_of(known)
    if builtin_dataset(name) is not None:
        say(f"data.{key} {name} is a small dataset that comes with TrainingFactory")
    return None


def allocated(config: TrainingConfig, say: Say) -> Allocation | None:
    """Return the machines that a run names by the id of a ComputeFactory's allocation; None where it names none."""
    name = config.compute.allocation_id
    if name is None or name in entries()["compute"]:
        return None
    given = COMPUTE.ask(name)
    if given is not None:
        return Allocation.of(given)
    if not COMPUTE.installed or COMPUTE.method(COMPUTE.find) is not None:
        raise nowhere("compute", name, f"there is no allocation {name!r}; compute.num_gpus=N needs none")
    say(
        f"note: allocation {name}: ComputeFactory's {COMPUTE.manager} has no {COMPUTE.find}, so that nobody knows what "
        "it holds, and this machine is used as it is; hand in the allocation itself: allocation_id=allocation"
    )
    return Allocation.of(SimpleNamespace(allocation_id=name))


def with_machines(config: TrainingConfig, allocation: Allocation | None, say: Say) -> TrainingConfig:
    """Return the config with the compute section that an allocation makes; what is set there must fit into it."""
    if allocation is None:
        return config
    asked, most = config.compute.num_gpus, allocation.num_gpus
    if asked is not None and most is not None and asked > most:
        raise ValueError(f"compute.num_gpus is {asked}, but allocation {allocation.id} has {most} GPUs")
    given = {"num_gpus": most, "backend": allocation.backend}
    entry = TrainingConfig(compute={key: value for key, value in given.items() if value is not None})
    filled = _filled(config, entry, ())
    if most is not None:
        say(f"allocation {allocation.id} has {most} GPUs: compute.num_gpus={filled.compute.num_gpus}")
    return filled


@contextmanager
def told_with_places(kind: str) -> Iterator[None]:
    """Add to the error for a name that leads nowhere where else it was looked for."""
    try:
        yield
    except Unknown as error:
        raise nowhere(kind, error.name, error) from error


def nowhere(kind: str, name: str, last: object) -> ValueError:
    """Return the error for an id that leads nowhere, with all places that were looked at; `last` tells of the last."""
    near = did_you_mean(nearest(name, entries()[kind], cutoff=0.5))
    there = f"not under {kind}{near}" if Path(FILE).is_file() else "there is none in this folder"
    places = f"in {FILE} ({there})"
    if sibling := SIBLINGS.get(kind):
        there = "which does not know it" if sibling.installed else "not installed"
        places += f" and in {sibling.package} ({there})"
    return ValueError(f"{last}\n{name!r} was also looked for {places}; see docs/FACTORIES.md")
