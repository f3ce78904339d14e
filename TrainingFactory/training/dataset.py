"""Find what a run learns from and is measured on: the tasks of its environment, and rows that exist already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.common.user_code import told
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.examples import Examples, Form, load_examples
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import EnvironmentFactory, RewardFunction
from TrainingFactory.tools.schema import check_schema, schema_problems, validator_of
from TrainingFactory.types import Task, ToolSpec

DEFAULT_TASKS = 16
TRAINING_TASKS = 1000


@dataclass(slots=True)
class Objects:
    """What a user hands in as Python objects instead of naming it in the config."""

    environment: EnvironmentFactory | None = None
    reward: RewardFunction | None = None
    tasks: Sequence[Task] | None = None
    examples: Examples | None = None  # of `read_examples`
    heldout: Examples | None = None
    heldout_tasks: Sequence[Task] | None = None  # where episodes are sampled
    tools: Sequence[Any] = ()  # tools, sources of them, or what can be made a tool
    cache: Any = None  # a `ToolCache`
    allocation: Any = None  # machines of a ComputeFactory

    @property
    def given(self) -> list[str]:
        names = ("environment", "reward", "tasks", "examples", "heldout", "heldout_tasks", "tools")
        return [name for name in names if getattr(self, name)]


@dataclass(slots=True)
class Dataset:
    environment: EnvironmentFactory | None = None
    tasks: list[Task] = field(default_factory=list)  # to learn from
    heldout: list[Task] = field(default_factory=list)
    examples: Examples | None = None  # to learn from
    heldout_examples: Examples | None = None

    @property
    def size(self) -> int:
        return len(self.examples) if self.examples is not None else len(self.tasks)

    @property
    def digest(self) -> str:
        """Return another one where there is something else to learn from; objects may look different elsewhere."""
        digest = blake2b(digest_size=16)
        for example in self.examples.found if self.examples is not None else ():
            digest.update(repr((example.id, example.conversations)).encode(errors="surrogatepass"))
        for task in self.tasks:
            answer = task.answer if isinstance(task.answer, str | int | float) else None
            digest.update(repr((task.id, task.prompt, answer)).encode(errors="surrogatepass"))
        return digest.hexdigest()


def check_same(found: Dataset, about: dict[str, Any], name: str) -> None:
    """Raise if there is something else to learn from than `about` says, which was written down at the start."""
    was = about.get("size", found.size)
    if was != found.size or about.get("digest", found.digest) != found.digest:
        raise ValueError(
            f"the {was} tasks or rows that run {name} was started with have changed since then, and now there are "
            f"{found.size}: it goes on with the same data only. Put them back, or start a new run"
        )


def gather(config: TrainingConfig, objects: Objects, environment: EnvironmentFactory | None) -> Dataset:
    """Find what the run learns from and is measured on. `environment` is the one that the config names, if any."""
    found = Dataset(objects.environment or environment, examples=objects.examples)
    if found.examples is None and config.data.dataset is not None:
        found.examples = read_examples(config, config.data.dataset)
    if found.environment is not None and found.examples is None:
        found.tasks = list(objects.tasks or ()) or make_tasks(config, found.environment, TRAINING_TASKS)
        if KINDS[config.training.algorithm].demonstrations and not hasattr(found.environment, "expert"):
            raise ValueError(
                f"sft learns from demonstrations, and {environment_name(found.environment)} has no method `expert` "
                "that makes them; write one, or give a file: data.dataset=FILE.jsonl"
            )
    if config.training.eval_every is not None:
        _gather_heldout(config, objects, found)
    return found


def read_objects(
    config: TrainingConfig, into: Objects, tasks: Any = None, dataset: Any = None, heldout: Any = None
) -> None:
    """Read rows as the config says; those that are held out are tasks where episodes are sampled."""
    data = config.data
    if tasks is not None:
        into.tasks = load_tasks(tasks, data.dataset_split, data.count, data.columns)
    if dataset is not None:
        into.examples = read_examples(config, dataset)
    if heldout is not None and KINDS[config.training.algorithm].samples:
        into.heldout_tasks = _heldout_tasks(config, heldout)
    elif heldout is not None:
        learned = into.examples or data.dataset if dataset is None else dataset
        into.heldout = read_heldout(config, heldout, learned)


def read_examples(config: TrainingConfig, source: Any, heldout: bool = False) -> Examples:
    """Read a dataset in the form that the config's algorithm learns from; all that is wrong is told at once."""
    data = config.data
    count = data.heldout_count if heldout else data.count
    split = data.heldout_split if heldout else data.dataset_split
    source = str(source) if isinstance(source, Path) else source
    return load_examples(
        source, form_of(config), split=split, count=count, skip_bad_rows=data.skip_bad_rows, fits=arguments_fit,
        names=data.columns,
    )  # fmt: skip


def read_heldout(config: TrainingConfig, source: Any, dataset: Any) -> Examples:
    """Return rows to evaluate on, which may not be those of `dataset`, from which the run learns."""
    if dataset is None:
        raise ValueError(
            "held-out rows go with a dataset to learn from; where episodes are sampled or an expert plays, held-out "
            'tasks are a file: heldout="tasks.jsonl"'
        )
    data = config.data
    if _same_rows(dataset, source, data.dataset_split == data.heldout_split):
        raise ValueError(
            "data.heldout and data.dataset are the same rows, so that nothing would be held out; name another file, or "
            "for a dataset with several splits another data.heldout_split"
        )
    return read_examples(config, source, heldout=True)


def _same_rows(dataset: Any, heldout: Any, same_split: bool) -> bool:
    """Tell whether both are the same rows. A file and the folder of a run have no splits, other datasets may."""
    if not isinstance(dataset, str | Path) or not isinstance(heldout, str | Path):
        return dataset is heldout and (same_split or not isinstance(dataset, Mapping))
    ours, theirs = Path(dataset).expanduser(), Path(heldout).expanduser()
    if ours.exists() and theirs.exists():
        return ours.samefile(theirs) and (same_split or not (ours / "dataset_dict.json").is_file())
    return str(dataset) == str(heldout) and same_split


def form_of(config: TrainingConfig) -> Form:
    name = config.training.algorithm
    form = KINDS[name].form
    if form is None:
        takers = ", ".join(other for other, kind in KINDS.items() if kind.form is not None)
        raise ValueError(
            f"training.algorithm={name} learns from its own episodes and takes no dataset: data.tasks=FILE.jsonl "
            f"names its tasks; data.dataset is for {takers}"
        )
    return form(getattr(config, name))


def arguments_fit(spec: ToolSpec, arguments: dict[str, Any]) -> str | None:
    """Return what is wrong with the arguments of a call; None also where the tool's schema is no schema."""
    try:
        check_schema(spec)
    except ValueError:
        return None
    return schema_problems(spec, validator_of(spec.parameters), arguments)


def _gather_heldout(config: TrainingConfig, objects: Objects, found: Dataset) -> None:
    """Find rows like those of the dataset where there is one, tasks where there is an environment to play them in."""
    rows = found.examples is not None
    if rows:
        found.heldout_examples = objects.heldout
        if objects.heldout is None and config.data.heldout is not None:
            learned = config.data.dataset if objects.examples is None else objects.examples
            found.heldout_examples = read_heldout(config, config.data.heldout, learned)
    own = config.environment.environment_id is not None or objects.environment is not None
    if found.environment is not None and (own or found.heldout_examples is None):
        count = config.data.heldout_count
        if objects.heldout_tasks:
            found.heldout = list(objects.heldout_tasks)
        elif rows or config.data.heldout is None:
            found.heldout = own_tasks(config, found.environment, "heldout", "heldout", count)
        else:
            found.heldout = _heldout_tasks(config, config.data.heldout)
    elif found.heldout_examples is None:
        wanted = "held-out rows: data.heldout=FILE" if rows else "an environment: environment=NAME"
        raise ValueError(f"training.eval_every needs {wanted}")


def _heldout_tasks(config: TrainingConfig, source: Any) -> list[Task]:
    data = config.data
    return load_tasks(source, data.heldout_split, data.heldout_count, data.columns)


def make_tasks(
    config: TrainingConfig, environment: EnvironmentFactory, default_count: int = DEFAULT_TASKS
) -> list[Task]:
    """Return tasks of a dataset, or the environment's own: `default_count` where the config does not say how many."""
    data = config.data
    if data.tasks is not None:
        return load_tasks(data.tasks, data.dataset_split, data.count, data.columns)
    return own_tasks(config, environment, "tasks", data.split, data.count or default_count)


def own_tasks(
    config: TrainingConfig, environment: EnvironmentFactory, key: str, split: str, count: int
) -> list[Task]:
    """Return what the environment makes; `key` of the data section would name a file of them."""
    name, seed = config.environment.environment_id or environment_name(environment), config.data.seed
    if name == ToolEnvironment.__name__:
        raise ValueError(
            "tools without an environment make a plain conversation, and its tasks come from a file: "
            f"data.{key}=FILE.jsonl, with a prompt and an answer in each line"
        )
    try:
        tasks = list(islice(environment.tasks(split, seed, count), count))
    except Exception as error:  # foreign code
        raise told(error) from error
    if not tasks:
        raise ValueError(f"environment {name} made no task for split {split!r} and seed {seed}")
    if wrong := next((task for task in tasks if not isinstance(task, Task)), None):
        raise ValueError(f"environment {name} must make Task objects, not {type(wrong).__name__}")
    seen = Counter(task.id for task in tasks)
    if twice := sorted(task_id for task_id, count in seen.items() if count > 1):
        raise ValueError(f"environment {name} gave several tasks the same id: {', '.join(twice[:5])}")
    return tasks


def makes_tasks(environment: EnvironmentFactory) -> bool:
    """Tell whether it has a method `tasks` of its own."""
    return getattr(environment.tasks, "__func__", None) is not ToolEnvironment.tasks.__func__


def environment_name(environment: EnvironmentFactory) -> str:
    return getattr(environment, "__name__", type(environment).__name__)  # a class, or an object of the user's
