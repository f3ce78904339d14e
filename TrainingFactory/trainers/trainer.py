"""What all trainers share: names and objects become a config and a run, and `train()` runs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.environment import as_ours, environment_of
from TrainingFactory.assembly.export import Exported, export
from TrainingFactory.assembly.learner_processes import served
from TrainingFactory.assembly.rewards import check_group, move_object
from TrainingFactory.assembly.tools import listed
from TrainingFactory.common.texts import count
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.names import expand
from TrainingFactory.protocols import AnyReward
from TrainingFactory.resolve.factories import by_file
from TrainingFactory.resolve.siblings import rows_of
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.runs.folder import RunFolder, TrainingReport
from TrainingFactory.runs.tracking import PlainLines, Watcher
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.trainers.keywords import into_sections, merge_into_section, merged
from TrainingFactory.trainers.notices import notices, unused
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.trainers.trl_keywords import FromTRL
from TrainingFactory.training.dataset import Objects, read_objects


class Trainer:
    """Train by one algorithm. What is not named by text can be handed in as an object."""

    algorithm: ClassVar[str]

    def __init__(
        self,
        model: Any = None,
        environment: Any = None,
        *,
        reward_function: AnyReward | str | None = None,
        tools: Any = (),
        tasks: Any = None,
        dataset: Any = None,
        heldout: Any = None,
        config: TrainingConfig | None = None,
        name: str | None = None,
        resume: bool = False,
        replay: str | Path | None = None,
        watcher: Watcher | None = None,
        allocation_id: Any = None,
        **options: Any,
    ) -> None:
        """Check everything that is given; nothing is loaded before `train()`.

        `model` is a name or one of `TrainingFactory.models`; `environment` a name, a Python file, a class, or a
        section of the config, with `tools` in it or not. `tools` are added to those of the environment: tools, typed
        functions, `MCPTools` and other sources, or names; several or one. With `tools` and `tasks` alone there is a
        plain conversation. `tasks` are `Task` objects, or rows like those of `dataset`, which is a file, a hub id, or
        rows as Python objects (dicts, a `datasets.Dataset`), and so is `heldout`: with
        `eval_every=N` it is measured and not learned (for trainers that sample, tasks).

        `options` are keys of the config in short form (`learning_rate=1e-5`, `use_lora=True`, and those of the
        algorithm: `DPOTrainer(beta=0.2)`) or sections of it (`sampling={"max_tokens": 64}`); they go before `config`;
        `tool_cache` may be a `ToolCache` too. Names of TRL (`train_dataset`, `reward_funcs`, `args=`) are taken for
        what they mean. `resume=True` goes on with the run `name`; `replay` names a run whose recorded tool
        calls are served again. `dataset_id`, `environment_id` and `allocation_id` are ids, or what the other factories
        gave: docs/FACTORIES.md."""
        self.objects = Objects()
        dataset = _handed(options, "dataset_id", dataset)
        environment = _handed(options, "environment_id", environment)
        theirs = FromTRL(options, self.algorithm, (config or TrainingConfig()).training.group_size)
        reward_function, tasks, dataset, heldout, name = theirs.over(
            reward_function=reward_function, tasks=tasks, dataset=dataset, heldout=heldout, name=name
        )
        self._notes = theirs.notes
        if isinstance(options.get("tool_cache"), ToolCache):
            self.objects.cache = options.pop("tool_cache")
        given = self._in_sections(options)
        merge_into_section(given, "training", {"algorithm": self.algorithm})
        if model is not None:
            merge_into_section(given, "model", _model_section(model))
        self._take_reward(reward_function, given)
        if allocation_id is not None:
            merge_into_section(given, "compute", {"allocation_id": allocation_id})
            self.objects.allocation = None if isinstance(allocation_id, str) else allocation_id
        self._take_tools([*self._take_environment(environment, given), *listed(tools)], given)
        for key, value in {"tasks": tasks, "dataset": dataset, "heldout": heldout}.items():
            if isinstance(value, str | Path):
                merge_into_section(given, "data", {key: value})
        self._tasks, self._dataset, self._heldout = map(_rows, (tasks, dataset, heldout))
        self._name, self._resume, self._replay = name, resume, replay
        self._watcher = watcher or PlainLines()
        self._run: Path | None = None
        self._take(merged(config, given))

    def train(self, config: TrainingConfig | Mapping[str, Any] | None = None) -> TrainingReport:
        """Train, and return how it went. Options in `config` go before those of the trainer. It works in a script, in
        a notebook and inside a running event loop."""
        self._given(config)
        report = served(self.config) or self._training().train()
        self._run = report.run
        return report

    async def train_async(self, config: TrainingConfig | Mapping[str, Any] | None = None) -> TrainingReport:
        """Train on the running event loop, for tools and rewards that belong to it."""
        self._given(config)
        report = served(self.config) or await self._training().train_async()
        self._run = report.run
        return report

    def save_model(self, path: str | Path | None = None, *, merge: bool = False) -> Exported:
        """Write what was trained, as its last checkpoint has it, into a folder that other programs load: `path`, or
        `model` in the run's folder. `merge` folds an adapter into the model under it."""
        if self._run is None:
            raise ValueError(
                "there is no model to save yet: call train() first (tfactory export writes that of a run which exists)"
            )
        return export(str(self._run), path if path is not None else self._run / "model", merge)

    def _given(self, config: TrainingConfig | Mapping[str, Any] | None) -> None:
        if config is not None:
            self._take(merged(self.config, self._in_sections(config)))

    def _training(self) -> Training:
        """Return the run that `train()` is to run: a new one, or with `resume` the one of that name."""
        for text in self.notices:
            self._watcher.say(f"note: {text}")
        run, taken = None, self.config
        if self._resume:
            if self._name is None:
                raise ValueError("resume=True goes on with a run, so it needs its name: name=...")
            run = RunFolder.find(self._name, self.config.logging.output_dir)
            taken = run.config
        if run is not None and taken != by_file(self.config):
            self._watcher.say(
                f"note: the options of this trainer are not those of run {self._name}; the run keeps its own"
            )
        made = Training(
            taken, name=self._name, run=run, objects=self.objects, watcher=self._watcher, replay=self._replay
        )
        self._watcher.say(f"run {made.run.name} in {made.run.path}: {count(made.total, 'step')}")
        return made

    def _in_sections(self, config: TrainingConfig | Mapping[str, Any]) -> dict[str, Any]:
        """Return the options in sections, without the algorithm, which may not be another one."""
        whole = isinstance(config, TrainingConfig)
        given = expand(
            config.model_dump(exclude_unset=True) if whole else into_sections(config, self.algorithm)
        )
        training = given.get("training")
        named = training.pop("algorithm", self.algorithm) if isinstance(training, dict) else self.algorithm
        if named != self.algorithm:
            raise ValueError(
                f"training.algorithm is {named}, and {type(self).__name__} trains by {self.algorithm}; leave it out, "
                "or take the trainer of that algorithm"
            )
        return given

    def _take(self, config: TrainingConfig) -> None:
        """Make this the trainer's config, and read the rows that were handed in as it says."""
        self.config, objects = config, self.objects
        if objects.environment is not None and config.environment.options:
            raise ValueError(
                "environment.options are for an environment that is named; hand them to the object itself"
            )
        read_objects(config, objects, self._tasks, self._dataset, self._heldout)
        if KINDS[self.algorithm].samples:
            check_group(objects.reward, config.training.group_size)
        played = objects.environment is not None or bool(objects.tools)
        heldout = self._heldout is not None
        rewarded = objects.reward is not None
        about = notices(config, rewarded=rewarded)
        self.notices = [*self._notes, *about, *unused(config, played=played, heldout=heldout)]
        stays = rewarded and move_object(objects.reward, config) is objects.reward
        if config.optimization.distributed_reward and stays:
            self.notices.append(
                "optimization.distributed_reward: a reward that is a Python object runs in this process; to run it "
                "in worker processes, name it: reward.type=function"
            )

    def _take_reward(self, reward: Any, given: dict[str, Any]) -> None:
        """Put its type among the options, or the callable among the objects."""
        if callable(reward):
            self.objects.reward = as_reward(reward)
        elif isinstance(reward, str):
            given["reward_function"] = reward
        elif reward is not None:
            raise ValueError(
                f"reward_function is {reward!r:.60}; it takes one callable, or the name of a reward type such as "
                "rule_based. Several become one by Combined({name: (weight, reward)}) of "
                "TrainingFactory.rewards.combined, or in a config by reward.parts"
            )

    def _take_environment(self, environment: Any, given: dict[str, Any]) -> list[Any]:
        """Put it among the options, or as an object in the place of what a config names; return the tools it brings."""
        if isinstance(environment, Mapping):
            rest = dict(environment)
            tools = listed(rest.pop("tools", ()))
            if (scenario := _handed(rest, "environment_id", None)) is not None:
                rest["environment_id"], self.objects.environment = None, environment_of(scenario)
            merge_into_section(given, "environment", rest)
            return tools
        if hasattr(environment, "scenario_id"):
            environment = environment_of(environment)
        if isinstance(environment, str | Path):
            merge_into_section(given, "environment", {"environment_id": environment})
        elif environment is not None:
            merge_into_section(given, "environment", {"environment_id": None})
            self.objects.environment = as_ours(environment)
        return []

    def _take_tools(self, tools: list[Any], given: dict[str, Any]) -> None:
        """Put those that are named among the options, the others among the objects."""
        if named := [entry for entry in tools if isinstance(entry, str | Mapping)]:
            given["tools"] = named
        self.objects.tools = [as_tool(entry) for entry in tools if not isinstance(entry, str | Mapping)]


def _handed(options: dict[str, Any], key: str, otherwise: Any) -> Any:
    """Take what another factory gave out of the options, where it stands in the place of its id."""
    if isinstance(options.get(key), str | Path | None):
        return otherwise
    if otherwise is not None:
        raise ValueError(f"{key} and {key.removesuffix('_id')} are both given; leave one of them out")
    return options.pop(key)


def _rows(source: Any) -> Any:
    """Return rows that were handed in as objects, so that they can be read twice; None for the name of a dataset."""
    if isinstance(source, str | Path):
        return None
    if hasattr(source, "dataset_id"):
        source = rows_of(source)
    return list(source) if isinstance(source, Iterator) else source


def _model_section(model: Any) -> Mapping[str, Any]:
    if isinstance(model, Mapping | str | Path):
        return model if isinstance(model, Mapping) else {"name": model}
    from TrainingFactory.models.faces import ModelFace  # torch, which whoever has one of these has already

    if not isinstance(model, ModelFace):
        raise ValueError(
            f"model is a {type(model).__name__}; give a name, a folder, or one of TrainingFactory.models, such as "
            'Qwen3Model("qwen3-4b")'
        )
    return model.section
