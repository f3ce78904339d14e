"""Looking up ids in DataFactory, EnvironmentFactory and ComputeFactory, if they are installed. docs/FACTORIES.md lists
the attributes that their objects need."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from TrainingFactory.common.starters import find_docs
from TrainingFactory.common.texts import describe

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class SiblingFactory:
    """Another framework that resolves ids: its package, and the class in its `services` with its methods."""

    package: str
    class_name: str
    find_method: str
    required_method: str  # method that every version of the class has

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None

    def load_method(self, method_name: str) -> Callable[..., Any] | None:
        """Instantiate the factory's class and return its method `method_name`; None if it has no such method."""
        path = f"{self.package}.services.{self.class_name}"
        try:
            manager = getattr(import_module(f"{self.package}.services"), self.class_name)()
        except Exception as error:  # foreign code
            raise ValueError(f"{self.package} is installed, but {path}() fails: {describe(error)}") from error
        if not hasattr(manager, self.required_method):
            raise ValueError(
                f"{self.package} is installed, but {path} has no method {self.required_method}. Update {self.package}, "
                "or add the id to factories.yaml, which is searched first"
            )
        return getattr(manager, method_name, None)

    def find_object(self, name: str) -> Any:
        """Return the object with this id; None if the package is not installed or does not know the id."""
        find_object = self.load_method(self.find_method) if self.is_installed else None
        if find_object is None:
            return None
        try:
            return find_object(name)
        except LookupError:
            return None
        except Exception as error:  # foreign code
            log.warning("%s failed to look up %r; trying elsewhere: %s", self.package, name, describe(error))
            return None


DATA_FACTORY = SiblingFactory("DataFactory", "DatasetManager", "get_dataset", "get_dataset")
ENVIRONMENT_FACTORY = SiblingFactory("EnvironmentFactory", "ScenarioBuilder", "get_scenario", "get_scenario")
COMPUTE = SiblingFactory("ComputeFactory", "ResourceManager", "get_allocation", "allocate_resource")
SIBLING_FACTORIES = {"datasets": DATA_FACTORY, "environments": ENVIRONMENT_FACTORY, "compute": COMPUTE}


def get_rows(dataset: Any) -> Any:
    """Return the data of a DataFactory dataset: its `path` to a file, its `rows`, or the dataset itself."""
    path, rows = getattr(dataset, "path", None), getattr(dataset, "rows", dataset)
    if isinstance(path, str | Path):
        return path
    if not isinstance(rows, Iterable):
        raise ValueError(
            f"dataset {getattr(dataset, 'dataset_id', '')!r} is a {type(dataset).__name__}, which has no `path` (a "
            f"file), no `rows` (dicts) and is not iterable. See {find_docs('FACTORIES.md')}"
        )
    return rows


@dataclass(slots=True)
class Allocation:
    """Machines allocated to one run; `num_gpus` and `backend` are None if unknown."""

    id: str
    num_gpus: int | None = None
    backend: str | None = None
    release_callback: Callable[[], Any] | None = None

    @classmethod
    def from_object(cls, lease: Any) -> Allocation:
        """Convert a ComputeFactory allocation: its GPUs are `num_gpus`, or the `count` of its `resource_spec`."""
        resource_spec, num_gpus = getattr(lease, "resource_spec", lease), getattr(lease, "num_gpus", None)
        if num_gpus is None and getattr(resource_spec, "resource_type", None) == "gpu":
            num_gpus = getattr(resource_spec, "count", None)
        allocation_id = str(lease.allocation_id)
        if num_gpus is not None and (not isinstance(num_gpus, int) or num_gpus < 1):
            raise ValueError(
                f"allocation {allocation_id!r} has {num_gpus!r} GPUs; the number must be an integer from 1"
            )
        callback = getattr(lease, "release", None)
        if callback is None and COMPUTE.is_installed and (method := COMPUTE.load_method("release_resource")):
            callback = functools.partial(method, allocation_id)
        return cls(allocation_id, num_gpus, getattr(lease, "backend", None), callback)

    def release(self) -> None:
        """Release the machines once; log failures, so that they never mask the run's own error."""
        callback, self.release_callback = self.release_callback, None
        if callback is not None:
            try:
                callback()
            except Exception as error:  # foreign code
                log.warning("cannot release allocation %s: %s", self.id, describe(error))
