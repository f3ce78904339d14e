"""The base class of all trainers: it turns names and Python objects into a config, and `train()` runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.environment import as_environment_factory, make_scenario_environment
from TrainingFactory.assembly.export import ExportedModel, export
from TrainingFactory.assembly.learner_processes import serve_rank
from TrainingFactory.assembly.rewards import check_group_size, move_to_workers
from TrainingFactory.assembly.tools import as_list
from TrainingFactory.common.texts import pluralize
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.names import expand
from TrainingFactory.protocols import AnyReward, Tool, ToolSource
from TrainingFactory.resolve.factories import resolve_ids
from TrainingFactory.resolve.siblings import get_rows
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.runs.folder import RunFolder, TrainingReport
from TrainingFactory.runs.notebook_view import make_default_watcher, render_run
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.trainers.inputs import (
    AllocationObject,
    DatasetLike,
    EnvironmentLike,
    ModelLike,
    TasksLike,
    ToolsLike,
)
from TrainingFactory.trainers.keywords import group_by_section, merge_into_section, with_options
from TrainingFactory.trainers.notices import list_notices, list_unused_options
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.trainers.trl_keywords import TRLTranslation
from TrainingFactory.training.dataset import UserObjects, read_objects


class Trainer:
    """Base class of the trainers, each for one algorithm. Model, environment, reward, tools and data are given by name
    or as Python objects."""

    algorithm: ClassVar[str]

    def __init__(
        self,
        model: ModelLike | None = None,
        environment: EnvironmentLike | None = None,
        *,
        reward_function: AnyReward | str | None = None,
        tools: ToolsLike = (),
        tasks: TasksLike | None = None,
        dataset: DatasetLike | None = None,
        heldout: TasksLike | None = None,
        config: TrainingConfig | None = None,
        name: str | None = None,
        resume: bool = False,
        replay: str | Path | None = None,
        watcher: Watcher | None = None,
        allocation_id: str | AllocationObject | None = None,
        **options: Any,
    ) -> None:
        """Check all arguments; nothing is loaded before `train()`.

        - `model`: a name, or one of `TrainingFactory.models`.
        - `environment`: a name, a Python file, a class, or a section of the config, which may contain `tools`.
        - `tools`: added to those of the environment: tools, typed functions, `MCPTools` and other sources, or names.
          With `tools` and `tasks` alone the environment is a plain conversation.
        - `dataset`, `tasks`, `heldout`: a file, a hub id, or rows as Python objects (dicts, a `datasets.Dataset`);
          `tasks` may be `Task` objects. `heldout` is evaluated with `eval_every=N` and never trained on; for trainers
          that sample it holds tasks.
        - `resume=True` resumes the run `name`. `replay` names a run whose recorded tool calls are served again.
        - `dataset_id`, `environment_id`, `allocation_id`: ids, or objects of the other factories (docs/FACTORIES.md).
        - `options`: keys of the config in short form (`learning_rate=1e-5`, `use_lora=True`, those of the algorithm:
          `DPOTrainer(beta=0.2)`), or sections (`sampling={"max_tokens": 64}`). They override `config`. `tool_cache`
          may be a `ToolCache`. TRL's names (`train_dataset`, `reward_funcs`, `args=`) are translated."""
        self.objects = UserObjects()
        dataset = _pop_object(options, "dataset_id", dataset)
        environment = _pop_object(options, "environment_id", environment)
        trl = TRLTranslation(options, self.algorithm, (config or TrainingConfig()).training.group_size)
        reward_function, tasks, dataset, heldout, name = trl.resolve_objects(
            reward_function=reward_function, tasks=tasks, dataset=dataset, heldout=heldout, name=name
        )
        self._notes = trl.notes
        if isinstance(options.get("tool_cache"), ToolCache):
            self.objects.cache = options.pop("tool_cache")
        config_keys = self._group_by_section(options)
        merge_into_section(config_keys, "training", {"algorithm": self.algorithm})
        if model is not None:
            merge_into_section(config_keys, "model", _as_model_section(model))
        self._store_reward(reward_function, config_keys)
        if allocation_id is not None:
            merge_into_section(config_keys, "compute", {"allocation_id": allocation_id})
            self.objects.allocation = None if isinstance(allocation_id, str) else allocation_id
        self._store_tools([*self._store_environment(environment, config_keys), *as_list(tools)], config_keys)
        for key, value in {"tasks": tasks, "dataset": dataset, "heldout": heldout}.items():
            if isinstance(value, str | Path):
                merge_into_section(config_keys, "data", {key: value})
        self._tasks, self._dataset, self._heldout = map(_as_rows, (tasks, dataset, heldout))
        self._name, self._resume, self._replay = name, resume, replay
        self._watcher = watcher
        self._run_folder: Path | None = None
        self._set_config(with_options(config, config_keys))

    def train(self, config: TrainingConfig | Mapping[str, Any] | None = None) -> TrainingReport:
        """Train and return a report. Options in `config` override those of the trainer. Works in a script, in a
        notebook and inside a running event loop."""
        self._override_config(config)
        report = serve_rank(self.config) or self._make_training().train()
        self._run_folder = report.run
        return report

    async def train_async(self, config: TrainingConfig | Mapping[str, Any] | None = None) -> TrainingReport:
        """Train on the running event loop, for tools and rewards that belong to it."""
        self._override_config(config)
        report = serve_rank(self.config) or await self._make_training().train_async()
        self._run_folder = report.run
        return report

    def save_model(self, path: str | Path | None = None, *, merge: bool = False) -> ExportedModel:
        """Export the last checkpoint into a folder that other programs load: `path`, or `model` in the run folder.
        `merge` merges an adapter into its base model."""
        if self._run_folder is None:
            raise ValueError(
                "there is no model to save yet: call train() first (tfactory export writes the model of an earlier run)"
            )
        return export(str(self._run_folder), path if path is not None else self._run_folder / "model", merge)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._list_settings())
        return f"{type(self).__name__}({settings})"

    def _repr_html_(self) -> str:
        """Return the trainer for a notebook: a table of what it trains, and charts of its run."""
        rows = RunFolder(self._run_folder).metrics() if self._run_folder is not None else []
        return render_run(type(self).__name__, self._list_settings(), rows)

    def _list_settings(self) -> list[tuple[str, str]]:
        """Return the main settings as (name, value as text)."""
        config, objects = self.config, self.objects
        environment = config.environment.environment_id
        if objects.environment is not None:
            environment = getattr(objects.environment, "__name__", type(objects.environment).__name__)
        tools = [tool.name for tool in config.tools] + [_get_tool_name(tool) for tool in objects.tools]
        settings = {
            "model": config.model.name,
            "environment": environment,
            "tools": ", ".join(tools),
            "tasks": pluralize(len(objects.tasks), "task") if objects.tasks else config.data.tasks,
            "dataset": pluralize(len(objects.examples), "row") if objects.examples else config.data.dataset,
            "steps": config.training.max_steps,
            "run": self._run_folder,
        }
        return [(name, str(value)) for name, value in settings.items() if value]

    def _override_config(self, config: TrainingConfig | Mapping[str, Any] | None) -> None:
        if config is not None:
            self._set_config(with_options(self.config, self._group_by_section(config)))

    def _make_training(self) -> Training:
        """Return the run that `train()` executes: a new one, or with `resume` the existing run of that name."""
        watcher = self._watcher or make_default_watcher()
        for notice in self.notices:
            watcher.say(f"note: {notice}")
        run, config = None, self.config
        if self._resume:
            if self._name is None:
                raise ValueError("resume=True needs the name of the run: name=...")
            run = RunFolder.find(self._name, self.config.logging.output_dir)
            config = run.config
        if run is not None and config != resolve_ids(self.config):
            watcher.say(
                f"note: the options of this trainer differ from those of run {self._name}; the run keeps its own"
            )
        training = Training(
            config, name=self._name, run=run, objects=self.objects, watcher=watcher, replay=self._replay
        )
        steps_text = pluralize(training.num_steps, "step")
        watcher.say(f"run {training.run.name} in {training.run.path}: {steps_text}")
        return training

    def _group_by_section(self, config: TrainingConfig | Mapping[str, Any]) -> dict[str, Any]:
        """Return the options in sections, without the algorithm; raise if it is another than the trainer's."""
        if isinstance(config, TrainingConfig):
            sections = expand(config.model_dump(exclude_unset=True))
        else:
            sections = expand(group_by_section(config, self.algorithm))
        training = sections.get("training")
        name = training.pop("algorithm", self.algorithm) if isinstance(training, dict) else self.algorithm
        if name != self.algorithm:
            raise ValueError(
                f"training.algorithm is {name}, but {type(self).__name__} trains with {self.algorithm}; leave it out, "
                "or use the trainer of that algorithm"
            )
        return sections

    def _set_config(self, config: TrainingConfig) -> None:
        """Set the trainer's config, and parse the caller's rows with it."""
        self.config, objects = config, self.objects
        if objects.environment is not None and config.environment.options:
            raise ValueError(
                "environment.options are for an environment given by name; pass them to the object itself"
            )
        read_objects(config, objects, self._tasks, self._dataset, self._heldout)
        if KINDS[self.algorithm].samples:
            check_group_size(objects.reward, config.training.group_size)
        has_reward = objects.reward is not None
        has_environment = objects.environment is not None or bool(objects.tools)
        self.notices = [
            *self._notes,
            *list_notices(config, has_reward=has_reward),
            *list_unused_options(config, has_episodes=has_environment, has_heldout=self._heldout is not None),
        ]
        runs_in_process = has_reward and move_to_workers(objects.reward, config) is objects.reward
        if config.optimization.distributed_reward and runs_in_process:
            self.notices.append(
                "optimization.distributed_reward: a reward that is a Python object runs in this process; to run it "
                "in worker processes, name it: reward.type=function"
            )

    def _store_reward(self, reward: Any, keys: dict[str, Any]) -> None:
        """Store a reward: the name of a reward type in the config keys `keys`, a callable in the trainer's objects."""
        if callable(reward):
            self.objects.reward = as_reward(reward)
        elif isinstance(reward, str):
            keys["reward_function"] = reward
        elif reward is not None:
            raise ValueError(
                f"reward_function is {reward!r:.60}; give one callable, or the name of a reward type such as "
                "rule_based. Combine several with Combined({name: (weight, reward)}) of "
                "TrainingFactory.rewards.combined, or in a config with reward.parts"
            )

    def _store_environment(self, environment: EnvironmentLike | None, keys: dict[str, Any]) -> list[Any]:
        """Store an environment: a name or a section in the config keys `keys`, an object in the trainer's objects.
        Return the tools in the section."""
        if isinstance(environment, Mapping):
            section = dict(environment)
            tools = as_list(section.pop("tools", ()))
            if (scenario := _pop_object(section, "environment_id", None)) is not None:
                section["environment_id"] = None
                self.objects.environment = make_scenario_environment(scenario)
            merge_into_section(keys, "environment", section)
            return tools
        if hasattr(environment, "scenario_id"):
            environment = make_scenario_environment(environment)
        if isinstance(environment, str | Path):
            merge_into_section(keys, "environment", {"environment_id": environment})
        elif environment is not None:
            merge_into_section(keys, "environment", {"environment_id": None})
            self.objects.environment = as_environment_factory(environment)
        return []

    def _store_tools(self, tools: list[Any], keys: dict[str, Any]) -> None:
        """Store tools: those given by name in the config keys `keys`, all others in the trainer's objects."""
        if tool_entries := [entry for entry in tools if isinstance(entry, str | Mapping)]:
            keys["tools"] = tool_entries
        self.objects.tools = [as_tool(entry) for entry in tools if not isinstance(entry, str | Mapping)]


def _get_tool_name(tool: Tool | ToolSource) -> str:
    return tool.spec.name if isinstance(tool, Tool) else type(tool).__name__


def _pop_object(options: dict[str, Any], key: str, default: Any) -> Any:
    """Remove and return an object of another factory that the caller passed under `key` instead of its id; else return
    `default`."""
    if isinstance(options.get(key), str | Path | None):
        return default
    if default is not None:
        raise ValueError(f"{key} and {key.removesuffix('_id')} are both given; leave one of them out")
    return options.pop(key)


def _as_rows(rows: Any) -> Any:
    """Return rows that the caller passed as Python objects, as a collection that can be read twice; None for the name
    of a dataset."""
    if isinstance(rows, str | Path):
        return None
    if hasattr(rows, "dataset_id"):
        rows = get_rows(rows)
    return list(rows) if isinstance(rows, Iterator) else rows


def _as_model_section(model: ModelLike) -> Mapping[str, Any]:
    if isinstance(model, Mapping | str | Path):
        return model if isinstance(model, Mapping) else {"name": model}
    # This imports torch, which a caller with such an object has imported.
    from TrainingFactory.models.faces import FamilyModel

    if not isinstance(model, FamilyModel):
        raise ValueError(
            f"model is a {type(model).__name__}; give a name, a folder, or one of TrainingFactory.models, such as "
            'Qwen3Model("qwen3-4b")'
        )
    return model.section
