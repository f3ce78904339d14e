"""Find what ids mean that only a project knows: in its `factories.yaml`, then in the factories beside this one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import load_config, read_yaml
from TrainingFactory.config.problems import ConfigError, Places, Problem
from TrainingFactory.config.schema import sections
from TrainingFactory.data.datasets import FILES
from TrainingFactory.data.disk import write_aside
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.options import Unknown, did_you_mean, nearest, one_of
from TrainingFactory.services.build.siblings import COMPUTE, SIBLINGS, Allocation, rows_of
from TrainingFactory.services.training.dataset import Objects, read_examples, read_heldout

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
            continue
        if not isinstance(ids, Mapping | None):
            problems.append(Problem((kind,), "must hold ids, each with what it leads to", ids))
            continue
        for name, value in (ids or {}).items():
            try:
                found[kind][str(name)] = as_config(kind, value)
            except ConfigError as error:
                for each in error.problems:
                    inner = each.key if isinstance(value, Mapping) else ()
                    problems.append(dataclasses.replace(each, key=(kind, str(name), *inner)))
    for kind, ids in found.items():
        for name, config in ids.items():
            if (target := leads_to(kind, config)) != name and target in ids:
                text = f"leads to {target!r}, which is an id here itself; write what that one leads to"
                problems.append(Problem((kind, name), text))
    if problems:
        raise Places(places, FILE).error(problems)
    return found


def add(kind: str, name: str, target: Sequence[str]) -> None:
    """Write an entry into the file, whose comments stay: `target` is what the id leads to, or key=value for several."""
    section = KINDS[kind][0].partition(".")[0]
    value: Any = target[0]
    if all("=" in each for each in target):
        keys = [each if "." in each.partition("=")[0] else f"{section}.{each}" for each in target]
        value = load_config(None, keys).model_dump(exclude_unset=True)
    elif len(target) > 1:
        raise ValueError(f"{' '.join(target)}: give one target, or several as key=value")
    as_config(kind, value)
    path = Path(FILE)
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if name in entries()[kind]:
        raise ValueError(f"{FILE} has {kind}.{name} already; edit it there")
    lines = before.splitlines()
    heads = [number for number, line in enumerate(lines) if line.partition("#")[0].rstrip() == f"{kind}:"]
    if not heads:
        lines.append(f"{kind}:")
        heads = [len(lines) - 1]
    after = "".join(lines[heads[0] + 1 : heads[0] + 2])
    indent = after[: len(after) - len(after.lstrip())] or "  "
    lines.insert(heads[0] + 1, f"{indent}{json.dumps(name)}: {json.dumps(value)}")
    write_aside(path, "\n".join(lines) + "\n")
    try:
        entries()
    except ValueError:
        write_aside(path, before) if before else path.unlink()
        raise


def as_config(kind: str, value: Any) -> TrainingConfig:
    """Return the part of a config that an entry stands for: a text, the keys of one section, or several sections."""
    section, _, key = KINDS[kind][0].partition(".")
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
    if kind == "models":
        return config.model.name if "name" in config.model.model_fields_set else None
    if kind == "datasets":
        return config.data.dataset or config.data.tasks
    if kind == "environments":
        return config.environment.environment_id
    section = config.compute
    gpus = "all GPUs" if section.num_gpus is None else f"{section.num_gpus} GPUs"
    return None if section.allocation_id else f"{gpus} of {section.backend}"


def model(name: str) -> str | None:
    """Return the model that a name leads to in the project's file; None where it is not in it."""
    entry = entries()["models"].get(name)
    return None if entry is None else entry.model.name


def by_file(config: TrainingConfig, say: Say = lambda _: None) -> TrainingConfig:
    """Return the config with what the project's file says for its ids; other keys of an entry fill what is not set."""
    known = entries()
    for kind, keys in KINDS.items():
        for full in keys:
            section, key = full.split(".")
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


def with_rows(config: TrainingConfig, given: Objects) -> tuple[TrainingConfig, Objects]:
    """Return the config and objects with the rows of datasets that a DataFactory knows; files and what is handed in as
    objects are left alone."""
    data, found = config.data, dataclasses.replace(given)
    if data.tasks is not None and found.tasks is None and (rows := _rows(data.tasks)) is not None:
        found.tasks = load_tasks(rows, data.dataset_split, data.count)
    if data.dataset is not None and found.examples is None and (rows := _rows(data.dataset)) is not None:
        found.examples = read_examples(config, rows)
    if data.heldout is not None and found.heldout is None and (rows := _rows(data.heldout)) is not None:
        if isinstance(rows, str | Path):
            config = _with(config, "data", {"heldout": str(rows)})
        elif config.training.eval_every is not None:
            found.heldout = read_heldout(config, rows, found.examples or data.dataset)
    return config, found


def _rows(name: str) -> Any:
    path = Path(name).expanduser()
    is_file = path.suffix.lower() in FILES or name.startswith((".", "/", "~")) or path.exists()
    found = None if is_file else SIBLINGS["datasets"].ask(name)
    return None if found is None else rows_of(found)


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
