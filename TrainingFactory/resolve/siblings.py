"""Ask the factories beside this one, where they are installed, what an id means. docs/FACTORIES.md says what their
objects have to carry besides their id."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from TrainingFactory.common.texts import describe

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Sibling:
    """Names a package, the class in its `services` that knows ids, and the methods of that class."""

    package: str
    manager: str
    find: str
    needed: str  # the method that every version of it has

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None

    def method(self, name: str) -> Callable[..., Any] | None:
        """Return a method of a new manager; None where it has none of that name."""
        where = f"{self.package}.services.{self.manager}"
        try:
            manager = getattr(import_module(f"{self.package}.services"), self.manager)()
        except Exception as error:  # foreign code
            raise ValueError(
                f"{self.package} is installed, but {where}() cannot be made: {describe(error)}"
            ) from error
        if not hasattr(manager, self.needed):
            raise ValueError(
                f"{self.package} is installed, but {where} has no method {self.needed}; update {self.package}, or name "
                "the id in factories.yaml, which is looked at first"
            )
        return getattr(manager, name, None)

    def ask(self, name: str) -> Any:
        """Return the object that an id leads to; None where there is no such package, or it does not know the id."""
        find = self.method(self.find) if self.installed else None
        if find is None:
            return None
        try:
            return find(name)
        except LookupError:
            return None
        except Exception as error:  # foreign code
            log.warning(
                "%s did not give %r (%s); it is looked for elsewhere", self.package, name, describe(error)
            )
            return None


DATA = Sibling("DataFactory", "DatasetManager", "get_dataset", "get_dataset")
ENVIRONMENTS = Sibling("EnvironmentFactory", "ScenarioBuilder", "get_scenario", "get_scenario")
COMPUTE = Sibling("ComputeFactory", "ResourceManager", "get_allocation", "allocate_resource")
SIBLINGS = {"datasets": DATA, "environments": ENVIRONMENTS, "compute": COMPUTE}


def rows_of(dataset: Any) -> Any:
    """Return what a dataset of a DataFactory holds: the `path` of a file, its `rows`, or itself where it is rows."""
    path, rows = getattr(dataset, "path", None), getattr(dataset, "rows", dataset)
    if isinstance(path, str | Path):
        return path
    if not isinstance(rows, Iterable):
        raise ValueError(
            f"dataset {getattr(dataset, 'dataset_id', '')!r} is a {type(dataset).__name__} with neither a `path` (a "
            "file) nor `rows` (dicts), and it cannot be iterated over; see docs/FACTORIES.md"
        )
    return rows


@dataclass(slots=True)
class Allocation:
    """Holds machines for one run; `num_gpus` and `backend` are None where nobody says."""

    id: str
    num_gpus: int | None = None
    backend: str | None = None
    give_back: Callable[[], Any] | None = None

    @classmethod
    def of(cls, given: Any) -> Allocation:
        """Read an allocation of a ComputeFactory: its GPUs are `num_gpus`, or the `count` of its `resource_spec`."""
        spec, gpus = getattr(given, "resource_spec", given), getattr(given, "num_gpus", None)
        if gpus is None and getattr(spec, "resource_type", None) == "gpu":
            gpus = getattr(spec, "count", None)
        name = str(given.allocation_id)
        if gpus is not None and (not isinstance(gpus, int) or gpus < 1):
            raise ValueError(f"allocation {name!r} has {gpus!r} GPUs; it must be a number from 1 on")
        release = getattr(given, "release", None)
        if release is None and COMPUTE.installed and (by_id := COMPUTE.method("release_resource")):
            release = lambda: by_id(name)  # noqa: E731  # one of two ways
        return cls(name, gpus, getattr(given, "backend", None), release)

    def release(self) -> None:
        """Give the machines back, once; what goes wrong there is told, and hides nothing of the run."""
        give_back, self.give_back = self.give_back, None
        if give_back is not None:
            try:
                give_back()
            except Exception as error:  # foreign code
                log.warning("allocation %s could not be released: %s", self.id, describe(error))
