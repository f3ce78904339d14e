"""A run's training and held-out data: tasks of its environment, and examples of a dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.common.user_code import as_value_error
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.examples import Examples, Form, load_examples
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import EnvironmentFactory, RewardFunction
from TrainingFactory.tools.schema import check_arguments, check_schema, make_validator
from TrainingFactory.types import Task, ToolSpec

NUM_DEFAULT_TASKS = 16
NUM_TRAIN_TASKS = 1000


@dataclass(slots=True)
class UserObjects:
    """Data and functions that the user passes as Python objects instead of naming them in the config."""

    environment: EnvironmentFactory | None = None
    reward: RewardFunction | None = None
    tasks: Sequence[Task] | None = None
    examples: Examples | None = None  # from `read_examples`
    heldout: Examples | None = None
    heldout_tasks: Sequence[Task] | None = None  # for algorithms that sample episodes
    tools: Sequence[Any] = ()  # tools, tool sources, or functions to be made tools
    cache: Any = None  # a `ToolCache`
    allocation: Any = None  # machines allocated by a ComputeFactory

    @property
    def object_names(self) -> list[str]:
        names = ("environment", "reward", "tasks", "examples", "heldout", "heldout_tasks", "tools")
        return [name for name in names if getattr(self, name)]


@dataclass(slots=True)
class Dataset:
    environment: EnvironmentFactory | None = None
    tasks: list[Task] = field(default_factory=list)  # for training
    heldout: list[Task] = field(default_factory=list)
    examples: Examples | None = None  # for training
    heldout_examples: Examples | None = None

    @property
    def size(self) -> int:
        return len(self.examples) if self.examples is not None else len(self.tasks)

    @property
    def digest(self) -> str:
        """Return a digest of the training data. Answers that are objects are ignored, because their `repr` may differ
        in another process."""
        digest = blake2b(digest_size=16)
        for example in self.examples.usable if self.examples is not None else ():
            digest.update(repr((example.id, example.conversations)).encode(errors="surrogatepass"))
        for task in self.tasks:
            answer = task.answer if isinstance(task.answer, str | int | float) else None
            digest.update(repr((task.id, task.prompt, answer)).encode(errors="surrogatepass"))
        return digest.hexdigest()


def check_data_unchanged(dataset: Dataset, run_info: dict[str, Any], name: str) -> None:
    """Raise ValueError if the training data differs from `run_info`, which was recorded when run `name` started."""
    old_size = run_info.get("size", dataset.size)
    if old_size != dataset.size or run_info.get("digest", dataset.digest) != dataset.digest:
        raise ValueError(
            f"Cannot resume run {name}: its training data has changed ({old_size} tasks or rows at the start, "
            f"{dataset.size} now). Restore the original data, or start a new run"
        )


def gather_data(
    config: TrainingConfig, objects: UserObjects, environment: EnvironmentFactory | None
) -> Dataset:
    """Collect the run's training and held-out data. `environment` is the one named in the config, if any."""
    dataset = Dataset(objects.environment or environment, examples=objects.examples)
    if dataset.examples is None and config.data.dataset is not None:
        dataset.examples = read_examples(config, config.data.dataset)
    if dataset.environment is not None and dataset.examples is None:
        dataset.tasks = list(objects.tasks or ()) or make_tasks(config, dataset.environment, NUM_TRAIN_TASKS)
        if KINDS[config.training.algorithm].accepts_demonstrations and not hasattr(
            dataset.environment, "expert"
        ):
            raise ValueError(
                f"sft needs demonstrations, but {get_environment_name(dataset.environment)} has no `expert` method "
                "that generates them. Write one, or set data.dataset=FILE.jsonl"
            )
    if config.training.eval_every is not None:
        _gather_heldout(config, objects, dataset)
    return dataset


def read_objects(
    config: TrainingConfig, objects: UserObjects, tasks: Any = None, dataset: Any = None, heldout: Any = None
) -> None:
    """Read data with the config's options into `objects`. Held-out data are tasks if the algorithm samples episodes."""
    data = config.data
    if tasks is not None:
        objects.tasks = load_tasks(tasks, data.dataset_split, data.count, data.columns, data.image_urls)
    if dataset is not None:
        objects.examples = read_examples(config, dataset)
    if heldout is not None and KINDS[config.training.algorithm].samples:
        objects.heldout_tasks = _make_heldout_tasks(config, heldout)
    elif heldout is not None:
        training_data = objects.examples or data.dataset if dataset is None else dataset
        objects.heldout = read_heldout(config, heldout, training_data)


def read_examples(config: TrainingConfig, dataset: Any, is_heldout: bool = False) -> Examples:
    """Read a dataset in the format that the config's algorithm needs; report all invalid rows together."""
    data = config.data
    count = data.heldout_count if is_heldout else data.count
    split = data.heldout_split if is_heldout else data.dataset_split
    dataset = str(dataset) if isinstance(dataset, Path) else dataset
    return load_examples(
        dataset, make_form(config), split=split, count=count, skip_bad_rows=data.skip_bad_rows,
        check_call=find_call_problem,
        columns=data.columns, image_urls=data.image_urls,
    )  # fmt: skip


def read_heldout(config: TrainingConfig, heldout: Any, training_data: Any) -> Examples:
    """Read held-out examples; raise ValueError if they are the rows of `training_data`."""
    if training_data is None:
        raise ValueError(
            "Held-out rows need a training dataset. For an algorithm that samples episodes or plays an expert, pass a "
            'file of held-out tasks: heldout="tasks.jsonl"'
        )
    data = config.data
    if _have_same_rows(training_data, heldout, data.dataset_split == data.heldout_split):
        raise ValueError(
            "data.heldout and data.dataset are the same rows. Set data.heldout to another file, or data.heldout_split "
            "to another split of the dataset"
        )
    return read_examples(config, heldout, is_heldout=True)


def _have_same_rows(dataset: Any, heldout: Any, is_same_split: bool) -> bool:
    """Return whether the training and the held-out dataset are the same rows. Files and run folders have no splits;
    other datasets may."""
    if not isinstance(dataset, str | Path) or not isinstance(heldout, str | Path):
        return dataset is heldout and (is_same_split or not isinstance(dataset, Mapping))
    path, heldout_path = Path(dataset).expanduser(), Path(heldout).expanduser()
    if path.exists() and heldout_path.exists():
        return path.samefile(heldout_path) and (is_same_split or not (path / "dataset_dict.json").is_file())
    return str(dataset) == str(heldout) and is_same_split


def make_form(config: TrainingConfig) -> Form:
    algorithm = config.training.algorithm
    get_form = KINDS[algorithm].get_form
    if get_form is None:
        algorithms = ", ".join(name for name, kind in KINDS.items() if kind.get_form is not None)
        raise ValueError(
            f"training.algorithm={algorithm} trains on its own episodes, not on a dataset. Set its tasks with "
            f"data.tasks=FILE.jsonl; data.dataset is for {algorithms}"
        )
    return get_form(getattr(config, algorithm))


def find_call_problem(spec: ToolSpec, arguments: dict[str, Any]) -> str | None:
    """Return the problem with the arguments of a call; None if they are valid, or if the tool's own schema is
    invalid."""
    try:
        check_schema(spec)
    except ValueError:
        return None
    return check_arguments(spec, make_validator(spec.parameters), arguments)


def _gather_heldout(config: TrainingConfig, objects: UserObjects, dataset: Dataset) -> None:
    """Add held-out examples if the run trains on a dataset, and held-out tasks if it has an environment."""
    has_examples = dataset.examples is not None
    if has_examples:
        dataset.heldout_examples = objects.heldout
        if objects.heldout is None and config.data.heldout is not None:
            training_data = config.data.dataset if objects.examples is None else objects.examples
            dataset.heldout_examples = read_heldout(config, config.data.heldout, training_data)
    is_environment_set = config.environment.environment_id is not None or objects.environment is not None
    if dataset.environment is not None and (is_environment_set or dataset.heldout_examples is None):
        count = config.data.heldout_count
        if objects.heldout_tasks:
            dataset.heldout = list(objects.heldout_tasks)
        elif has_examples or config.data.heldout is None:
            dataset.heldout = generate_tasks(config, dataset.environment, "heldout", "heldout", count)
        else:
            dataset.heldout = _make_heldout_tasks(config, config.data.heldout)
    elif dataset.heldout_examples is None:
        remedy = "held-out rows: data.heldout=FILE" if has_examples else "an environment: environment=NAME"
        raise ValueError(f"training.eval_every needs {remedy}")


def _make_heldout_tasks(config: TrainingConfig, heldout: Any) -> list[Task]:
    data = config.data
    return load_tasks(heldout, data.heldout_split, data.heldout_count, data.columns, data.image_urls)


def make_tasks(
    config: TrainingConfig, environment: EnvironmentFactory, default_count: int = NUM_DEFAULT_TASKS
) -> list[Task]:
    """Return the tasks of data.tasks, or data.count tasks generated by the environment (None: `default_count`)."""
    data = config.data
    if data.tasks is not None:
        return load_tasks(data.tasks, data.dataset_split, data.count, data.columns, data.image_urls)
    return generate_tasks(config, environment, "tasks", data.split, data.count or default_count)


def generate_tasks(
    config: TrainingConfig, environment: EnvironmentFactory, key: str, split: str, count: int
) -> list[Task]:
    """Return `count` tasks generated by the environment. Error messages suggest the key data.`key` for a file of tasks
    instead."""
    name, seed = config.environment.environment_id or get_environment_name(environment), config.data.seed
    if name == ToolEnvironment.__name__:
        raise ValueError(
            f"Tools without an environment need a file of tasks: data.{key}=FILE.jsonl, with a prompt and an answer in "
            "each line"
        )
    try:
        tasks = list(islice(environment.tasks(split, seed, count), count))
    except Exception as error:  # user code
        raise as_value_error(error) from error
    if not tasks:
        raise ValueError(f"Environment {name} generated no tasks for split {split!r} and seed {seed}")
    if invalid_task := next((task for task in tasks if not isinstance(task, Task)), None):
        raise ValueError(f"Environment {name} must generate Task objects, not {type(invalid_task).__name__}")
    id_counts = Counter(task.id for task in tasks)
    if duplicate_ids := sorted(task_id for task_id, count in id_counts.items() if count > 1):
        raise ValueError(f"Environment {name} gave several tasks the same id: {', '.join(duplicate_ids[:5])}")
    return tasks


def generates_tasks(environment: EnvironmentFactory) -> bool:
    """Return whether the environment overrides `ToolEnvironment.tasks`."""
    return getattr(environment.tasks, "__func__", None) is not ToolEnvironment.tasks.__func__


def get_environment_name(environment: EnvironmentFactory) -> str:
    return getattr(environment, "__name__", type(environment).__name__)  # a class or a user's object
