"""Resolving the ids of a project: with its `factories.yaml`, then with the installed sibling factories."""

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

from TrainingFactory.common.options import UnknownNameError, did_you_mean, nearest, show_choices
from TrainingFactory.common.starters import find_docs
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.loading import load_config, read_yaml
from TrainingFactory.config.problems import ConfigError, KeyLocations, Problem
from TrainingFactory.config.schema import get_sections
from TrainingFactory.data.datasets import find_builtin_dataset, is_path
from TrainingFactory.data.disk import write_atomically
from TrainingFactory.resolve.siblings import COMPUTE, DATA_FACTORY, SIBLING_FACTORIES, Allocation, get_rows
from TrainingFactory.training.dataset import UserObjects, read_objects

IDS_FILE = "factories.yaml"
# kind of id -> config keys that accept it; the value or keys of an entry without sections belong to the first one
KEYS_BY_KIND = {
    "environments": ("environment.environment_id",),  # first, because an entry can contain other kinds of ids
    "models": ("model.name",),
    "datasets": ("data.dataset", "data.tasks", "data.heldout"),
    "compute": ("compute.allocation_id",),
}
EntriesByKind = dict[str, dict[str, TrainingConfig]]
Notify = Callable[[str], None]


def read_entries() -> EntriesByKind:
    """Read factories.yaml in the current folder; return the config fragment of each id, by kind."""
    path = Path(IDS_FILE)
    configs: EntriesByKind = {kind: {} for kind in KEYS_BY_KIND}
    if not path.is_file():
        return configs
    locations: dict[tuple[str | int, ...], str] = {}
    problems: list[Problem] = []
    for kind, ids in read_yaml(path, locations, problems).items():
        if kind not in KEYS_BY_KIND:
            problems.append(Problem((str(kind),), show_choices(kind, KEYS_BY_KIND)))
        elif not isinstance(ids, Mapping | None):
            problems.append(Problem((kind,), "must be a mapping from ids to their targets", ids))
        else:
            for name, entry in (ids or {}).items():
                try:
                    configs[kind][str(name)] = parse_entry(kind, entry)
                except ConfigError as error:
                    for problem in error.problems:
                        inner_key = problem.key if isinstance(entry, Mapping) else ()
                        problems.append(dataclasses.replace(problem, key=(kind, str(name), *inner_key)))
    template = "refers to {!r}, which is itself an id in this file. Write the target of that id"
    for kind, ids in configs.items():
        targets = {name: describe_target(kind, config) for name, config in ids.items()}
        chained_ids = {name: target for name, target in targets.items() if target != name and target in ids}
        problems += [Problem((kind, name), template.format(target)) for name, target in chained_ids.items()]
    if problems:
        raise KeyLocations(locations, IDS_FILE).make_error(problems)
    return configs


def add_entry(kind: str, name: str, target: Sequence[str]) -> None:
    """Add an entry to factories.yaml and keep its comments. `target` is one value, or several key=value options."""
    section, _ = _split_key(KEYS_BY_KIND[kind][0])
    entry_value: Any = target[0]
    if all("=" in option for option in target):
        options = [option if "." in option.partition("=")[0] else f"{section}.{option}" for option in target]
        entry_value = load_config(None, options).model_dump(exclude_unset=True)
    elif len(target) > 1:
        raise ValueError(f"invalid target {' '.join(target)!r}: give one value, or options as key=value")
    if name in read_entries()[kind]:
        raise ValueError(f"{IDS_FILE} already has {kind}.{name}. Edit the file to change it")
    path = Path(IDS_FILE)
    old_text = path.read_text(encoding="utf-8").rstrip() + "\n" if path.is_file() else ""
    entry = f"{json.dumps(name)}: {json.dumps(entry_value)}\n"
    if heading := re.search(rf"^{kind}:[ \t]*(?:#.*)?\n([ \t]*)", old_text, re.MULTILINE):
        new_text = f"{old_text[: heading.start(1)]}{heading[1] or '  '}{entry}{old_text[heading.start(1) :]}"
    else:
        new_text = f"{old_text}{kind}:\n  {entry}"
    write_atomically(path, new_text)
    try:
        read_entries()
    except ValueError:
        write_atomically(path, old_text) if old_text else path.unlink()
        raise


def parse_entry(kind: str, entry: Any) -> TrainingConfig:
    """Return the config fragment of a factories.yaml entry: a text, the keys of one section, or several sections."""
    section, key = _split_key(KEYS_BY_KIND[kind][0])
    if not isinstance(entry, Mapping):
        entry = {key: entry}
    if not entry.keys() & {"tools", *get_sections()}:
        entry = {section: dict(entry)}
    config = TrainingConfig(**entry)
    if describe_target(kind, config) is None and not (kind == "environments" and config.tools):
        example = "be a mapping such as {num_gpus: 8}" if kind == "compute" else f"set {section}.{key}"
        raise ConfigError([Problem((), f"must {example}")])
    return config


def describe_target(kind: str, config: TrainingConfig) -> str | None:
    """Return the target of a factories.yaml entry as one line; None for an environment that has only tools."""
    if kind == "compute":
        compute = config.compute
        gpu_text = "all GPUs" if compute.num_gpus is None else f"{compute.num_gpus} GPUs"
        return None if compute.allocation_id else f"{gpu_text} of {compute.backend}"
    candidates = [(getattr(config, section), key) for section, key in map(_split_key, KEYS_BY_KIND[kind])]
    return next((getattr(model, key) for model, key in candidates if key in model.model_fields_set), None)


def _split_key(key: str) -> tuple[str, str]:
    section, _, option = key.partition(".")
    return section, option


def get_model_target(name: str) -> str | None:
    """Return the target of a model id in factories.yaml; None if the file does not contain it."""
    entry = read_entries()["models"].get(name)
    return None if entry is None else entry.model.name


def resolve_ids(config: TrainingConfig, notify: Notify = lambda _: None) -> TrainingConfig:
    """Return the config with its ids replaced by their targets in factories.yaml. Further keys of an entry apply where
    the config does not set them."""
    entries = read_entries()
    for kind, id_keys in KEYS_BY_KIND.items():
        for id_key in id_keys:
            section, key = _split_key(id_key)
            id_ = getattr(getattr(config, section), key)
            if id_ not in entries[kind]:
                continue
            entry = entries[kind][id_]
            target = describe_target(kind, entry)
            config = _fill_unset(config, entry, id_keys)
            if kind != "compute":  # a resumed run looks its allocation up again
                config = _set_options(config, section, {key: target})
            notify(f"{id_key} {id_} is {target or 'a conversation with tools'} ({IDS_FILE})")
    return config


def _fill_unset(config: TrainingConfig, entry: TrainingConfig, id_keys: Sequence[str]) -> TrainingConfig:
    """Return the config with an entry's values for unset keys, except for `id_keys`."""
    for name in entry.model_fields_set:
        section, defaults = getattr(config, name), getattr(entry, name)
        if isinstance(defaults, BaseModel):
            unset_keys = defaults.model_fields_set - section.model_fields_set
            options = {key: getattr(defaults, key) for key in unset_keys if f"{name}.{key}" not in id_keys}
            config = _set_options(config, name, options)
        elif name not in config.model_fields_set:
            config = config.model_copy(update={name: defaults})
    return config


def _set_options(config: TrainingConfig, section: str, options: Mapping[str, Any]) -> TrainingConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=dict(options))})


def with_dataset_rows(
    config: TrainingConfig, objects: UserObjects, notify: Notify = lambda _: None
) -> UserObjects:
    """Return a copy of the objects that adds the rows of each dataset id that DataFactory resolves. Files, and
    data that the caller passed as Python objects, stay unchanged. `notify` gets one line per resolved id."""
    extended_objects = dataclasses.replace(objects)
    has_no_heldout = objects.heldout is None and objects.heldout_tasks is None
    needs_heldout = has_no_heldout and config.training.eval_every is not None
    needs = {"tasks": objects.tasks is None, "dataset": objects.examples is None, "heldout": needs_heldout}
    section = config.data
    rows = {k: _find_rows(k, getattr(section, k), notify) if needed else None for k, needed in needs.items()}
    read_objects(config, extended_objects, **rows)
    return extended_objects


def _find_rows(option: str, dataset_id: str | None, notify: Notify) -> Any:
    if dataset_id is None or is_path(dataset_id) or Path(dataset_id).exists():
        return None
    if (dataset := DATA_FACTORY.find_object(dataset_id)) is not None:
        notify(f"data.{option} {dataset_id} is a dataset of {DATA_FACTORY.package}")
        return get_rows(dataset)
    if find_builtin_dataset(dataset_id) is not None:
        notify(f"data.{option} {dataset_id} is a small dataset that comes with TrainingFactory")
    return None


def find_allocation(config: TrainingConfig, notify: Notify) -> Allocation | None:
    """Return the config's ComputeFactory allocation; None if the id is unset or an entry of factories.yaml."""
    name = config.compute.allocation_id
    if name is None or name in read_entries()["compute"]:
        return None
    allocation = COMPUTE.find_object(name)
    if allocation is not None:
        return Allocation.from_object(allocation)
    if not COMPUTE.is_installed or COMPUTE.load_method(COMPUTE.find_method) is not None:
        message = f"there is no allocation {name!r}. To use this machine without one, set compute.num_gpus=N"
        raise make_id_error("compute", name, message)
    notify(
        f"note: cannot look up the GPUs of allocation {name}, because ComputeFactory's {COMPUTE.class_name} has no "
        f"method {COMPUTE.find_method}. The run uses this machine. Pass the allocation object instead: "
        "allocation_id=allocation"
    )
    return Allocation.from_object(SimpleNamespace(allocation_id=name))


def with_allocation(config: TrainingConfig, allocation: Allocation | None, notify: Notify) -> TrainingConfig:
    """Return the config with the allocation's GPUs and backend where its compute section does not set them. Raise
    ValueError if the config asks for more GPUs than the allocation has."""
    if allocation is None:
        return config
    config_gpus, num_gpus = config.compute.num_gpus, allocation.num_gpus
    if config_gpus is not None and num_gpus is not None and config_gpus > num_gpus:
        allocation_text = f"allocation {allocation.id} has {num_gpus} GPUs"
        raise ValueError(f"compute.num_gpus={config_gpus}, but {allocation_text}")
    options = {"num_gpus": num_gpus, "backend": allocation.backend}
    entry = TrainingConfig(compute={key: value for key, value in options.items() if value is not None})
    config = _fill_unset(config, entry, ())
    if num_gpus is not None:
        notify(f"allocation {allocation.id} has {num_gpus} GPUs: compute.num_gpus={config.compute.num_gpus}")
    return config


@contextmanager
def add_searched_places(kind: str) -> Iterator[None]:
    """Add the other places that were searched to the error for an unknown name raised in the block."""
    try:
        yield
    except UnknownNameError as error:
        raise make_id_error(kind, error.name, error) from error


def make_id_error(kind: str, name: str, last_error: object) -> ValueError:
    """Return the error for an unknown id, with the last lookup's error and the other searched places."""
    hint = did_you_mean(nearest(name, read_entries()[kind], cutoff=0.5))
    reason = f"not under {kind}{hint}" if Path(IDS_FILE).is_file() else "no such file in this folder"
    note = f"in {IDS_FILE} ({reason})"
    if sibling := SIBLING_FACTORIES.get(kind):
        reason = "unknown id" if sibling.is_installed else "not installed"
        note += f" and in {sibling.package} ({reason})"
    return ValueError(f"{last_error}\nAlso searched for {name!r} {note}. See {find_docs('FACTORIES.md')}")
