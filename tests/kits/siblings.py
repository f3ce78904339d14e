"""The factories beside this one, as small packages of the shape that the first document shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path

DATA = """
class Dataset:
    def __init__(self, dataset_id):
        self.dataset_id = dataset_id
        talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        self.rows = [{"messages": talk}, {"messages": talk}]

class DatasetManager:
    def get_dataset(self, dataset_id):
        if dataset_id != "ds_tool_calling_v1":
            raise KeyError(dataset_id)
        return Dataset(dataset_id)
"""
ENVIRONMENTS = """
def shelf(item: str) -> str:
    "Where an item stands."
    return "shelf 3"

class Scenario:
    scenario_id, system_prompt, tools = "env_search_v1", "Look it up.", [shelf]
    tasks = [{"prompt": "Where is the tea?", "answer": "shelf 3"}]
    heldout = [{"prompt": "Where is the rice?", "answer": "shelf 3"}]

class ScenarioBuilder:
    def get_scenario(self, scenario_id):
        return Scenario() if scenario_id == Scenario.scenario_id else None
"""
COMPUTE = """
class ResourceSpec:
    def __init__(self, resource_type, count, memory_gb):
        self.resource_type, self.count, self.memory_gb = resource_type, count, memory_gb

class Allocation:
    def __init__(self, resource_spec):
        self.allocation_id, self.resource_spec = "alloc-1", resource_spec

class ResourceManager:
    def allocate_resource(self, pool_type, resource_spec):
        return Allocation(resource_spec)
"""
# What a ComputeFactory may have besides, so that an id alone is enough.
LOOKED_UP = """
released = []

class Held(Allocation):
    def release(self):
        released.append(self.allocation_id)

class ResourceManager(ResourceManager):
    def get_allocation(self, allocation_id):
        if allocation_id != "alloc-1":
            raise KeyError(allocation_id)
        return Held(ResourceSpec("gpu", 8, 640))
"""


@contextmanager
def installing(folder: Path) -> Iterator[Callable[..., None]]:
    """Gives a function that makes packages, `install(DataFactory=DATA)`, which can be imported until the end."""
    packages: set[str] = set()

    def install(**services: str) -> None:
        for package, text in services.items():
            (folder / package).mkdir(parents=True)
            (folder / package / "__init__.py").touch()
            (folder / package / "services.py").write_text(text)
        packages.update(services)
        invalidate_caches()

    sys.path.insert(0, str(folder))
    try:
        yield install
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]
