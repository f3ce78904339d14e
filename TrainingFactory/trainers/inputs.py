"""Types of the arguments that trainers accept: names, files and Python objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from TrainingFactory.envs.base import ForeignEnvironment, ToolEnvironment
from TrainingFactory.envs.self_play import SelfPlayEnvironment
from TrainingFactory.protocols import EnvironmentFactory, Tool, ToolSource
from TrainingFactory.types import Task

if TYPE_CHECKING:  # these import torch or pyarrow
    from datasets import Dataset, IterableDataset

    from TrainingFactory.models.faces import FamilyModel


class CallableTool(Protocol):
    """A tool with qwen_agent's interface; `call` gets the arguments as a JSON string."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    def call(self, params: str, **kwargs: Any) -> Any: ...


class DatasetObject(Protocol):
    """A dataset of a DataFactory."""

    @property
    def dataset_id(self) -> str: ...


class ScenarioObject(Protocol):
    """A scenario of an EnvironmentFactory."""

    @property
    def scenario_id(self) -> str: ...


class AllocationObject(Protocol):
    """Machines allocated by a ComputeFactory."""

    @property
    def allocation_id(self) -> str: ...


# A short name, hub id, folder, GGUF file, run or registered model; the config's section; or a class of
# TrainingFactory.models.
ModelLike: TypeAlias = "str | Path | Mapping[str, Any] | FamilyModel"
# A name, a Python file, the config's section, a class with `tasks`, or an environment of another framework.
EnvironmentLike: TypeAlias = (
    str
    | Path
    | Mapping[str, Any]
    | EnvironmentFactory
    | type[ToolEnvironment]
    | type[SelfPlayEnvironment]
    | ForeignEnvironment
    | type[ForeignEnvironment]
    | ScenarioObject
)
# A tool, a source of tools such as MCPTools, a typed function, the name of a built-in tool, or an entry of the config.
ToolLike: TypeAlias = (
    Tool | ToolSource | CallableTool | type[CallableTool] | Callable[..., Any] | str | Mapping[str, Any]
)
ToolsLike: TypeAlias = ToolLike | Iterable[ToolLike]
# A file, a hub id, or rows as Python objects.
DatasetLike: TypeAlias = (
    "str | Path | Iterable[Mapping[str, Any]] | Dataset | IterableDataset | DatasetObject"
)
# The same, or `Task` objects.
TasksLike: TypeAlias = "DatasetLike | Iterable[Task]"
