"""The trainers for Python: what can be named by text, or be handed in as objects, and `.train()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig, notices
from TrainingFactory.config.names import ALIASES, SHORT, expand
from TrainingFactory.config.not_yet import SAMPLED, unused
from TrainingFactory.config.section import Section
from TrainingFactory.protocols import AnyReward
from TrainingFactory.rewards.adapt import as_reward
from TrainingFactory.services.build.rewards import check_group
from TrainingFactory.services.build.tools import listed
from TrainingFactory.services.build.training import Training
from TrainingFactory.services.export import Exported, export
from TrainingFactory.services.runs.folder import RunFolder, TrainingReport
from TrainingFactory.services.runs.tracking import PlainLines, Watcher
from TrainingFactory.services.training.dataset import Objects, read_examples, read_heldout
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.types import Task


class _Trainer:
    algorithm: str

    def __init__(
        self,
        model: Any = None,
        environment: Any = None,
        reward_function: AnyReward | str | None = None,
        *,
        tools: Any = (),
        tasks: Sequence[Task] | str | Path | None = None,
        dataset: Any = None,
        heldout: Any = None,
        config: TrainingConfig | None = None,
        name: str | None = None,
        resume: bool = False,
        replay: str | Path | None = None,
        watcher: Watcher | None = None,
        allocation_id: str | None = None,
        **options: Any,
    ) -> None:
        """`model` is a name or one of `TrainingFactory.models`; `environment` a name, a Python file, a class, or a
        section of the config, with `tools` in it or not. `tools` are added to those of the environment: tools, typed
        functions, `MCPTools` and other sources, or names; several or one. With `tools` and `tasks` alone there is a
        plain conversation. `dataset` is a file, a hub id, or rows as Python objects, and so is `heldout`: with
        `eval_every=N` it is measured and not learned (for trainers that sample, a file of tasks).

        `options` are keys of the config in short form (`learning_rate=1e-5`, `use_lora=True`, and those of the
        algorithm: `DPOTrainer(beta=0.2)`) or sections of it (`sampling={"max_tokens": 64}`); they go before `config`;
        `tool_cache` may be a `ToolCache` too. `resume=True` goes on with the run `name`; `replay` names a run whose
        recorded tool calls are served again. `allocation_id` is for machines of a ComputeFactory."""
        objects = Objects()
        if isinstance(options.get("tool_cache"), ToolCache):
            objects.cache = options.pop("tool_cache")
        given = self._over(options)
        into(given, "training", {"algorithm": self.algorithm})
        if model is not None:
            into(given, "model", _model_section(model))
        _take_reward(reward_function, given, objects)
        tools = [*_take_environment(environment, given, objects), *listed(tools)]
        for key, value in {"tasks": tasks, "dataset": dataset, "heldout": heldout}.items():
            if isinstance(value, str | Path):
                into(given, "data", {key: value})
        if tasks is not None and not isinstance(tasks, str | Path):
            objects.tasks = list(tasks)
        if named := [entry for entry in tools if isinstance(entry, str | Mapping)]:
            given["tools"] = named
        objects.tools = [as_tool(entry) for entry in tools if not isinstance(entry, str | Mapping)]
        self.objects = objects
        self._dataset, self._heldout = _rows(dataset), _rows(heldout)
        self._name, self._resume, self._replay = name, resume, replay
        self._watcher = watcher or PlainLines()
        self._allocation_id = allocation_id
        self._run: Path | None = None
        self._take(merged(config, given))

    def _take(self, config: TrainingConfig) -> None:
        self.config, objects = config, self.objects
        if self._dataset is not None:
            objects.examples = read_examples(config, self._dataset)
        if self._heldout is not None:
            learned = config.data.dataset if self._dataset is None else self._dataset
            objects.heldout = read_heldout(config, self._heldout, learned)
        if config.training.algorithm in SAMPLED:
            check_group(objects.reward, config.training.group_size)
        played = objects.environment is not None or bool(objects.tools)
        self.notices = [
            *notices(config),
            *unused(config, played=played, heldout=objects.heldout is not None),
            *_about_objects(config, objects),
            *_about_allocation(self._allocation_id),
        ]

    def train(self, config: TrainingConfig | Mapping[str, Any] | None = None) -> TrainingReport:
        """`config` holds options that go before those of the trainer."""
        if config is not None:
            self._take(merged(self.config, self._over(config)))
        for text in self.notices:
            self._watcher.say(f"note: {text}")
        run = None
        if self._resume:
            if self._name is None:
                raise ValueError("resume=True goes on with a run, so it needs its name: name=...")
            run = RunFolder.find(self._name, self.config.logging.output_dir)
        taken = run.config if run is not None else self.config
        if taken != self.config:
            self._watcher.say(
                f"note: the options of this trainer are not those of run {self._name}; the run keeps its own"
            )
        training = Training(
            taken, name=self._name, run=run, objects=self.objects, watcher=self._watcher, replay=self._replay
        )
        report = training.train()
        self._run = report.run
        return report

    def save_model(self, path: str | Path | None = None, *, merge: bool = False) -> Exported:
        """Writes what was trained, as its last checkpoint has it, into a folder that other programs load: `path`, or
        `model` in the run's folder. `merge` folds an adapter into the model under it."""
        if self._run is None:
            raise ValueError(
                "there is no model to save yet: call train() first (tfactory export writes that of a run which exists)"
            )
        return export(str(self._run), path if path is not None else self._run / "model", merge)

    def _over(self, config: TrainingConfig | Mapping[str, Any]) -> dict[str, Any]:
        """The options in sections, without the algorithm, which may not be another one."""
        whole = isinstance(config, TrainingConfig)
        given = expand(config.model_dump(exclude_unset=True) if whole else placed(config, self.algorithm))
        training = given.get("training")
        if (
            isinstance(training, dict)
            and (named := training.pop("algorithm", self.algorithm)) != self.algorithm
        ):
            raise ValueError(
                f"training.algorithm is {named}, and {type(self).__name__} trains by {self.algorithm}; leave it out, "
                "or take the trainer of that algorithm"
            )
        return given


class GRPOTrainer(_Trainer):
    """Learns from rewards: `GRPOTrainer(model="qwen3-4b", environment="search", num_epochs=3).train()`."""

    algorithm = "grpo"


class PPOTrainer(_Trainer):
    """Learns from rewards with a critic; one episode of a task is enough: `PPOTrainer(..., group_size=1)`."""

    algorithm = "ppo"


class RFTTrainer(_Trainer):
    """Samples, keeps the episodes that the reward accepts, and learns them as demonstrations."""

    algorithm = "rft"


class SFTTrainer(_Trainer):
    """Learns from demonstrations: those in `dataset` (a file, a hub id, or OpenAI-style conversations), or those that
    the environment's own expert plays."""

    algorithm = "sft"


class DPOTrainer(_Trainer):
    """Learns from pairs of a better and a worse dialogue: `DPOTrainer(dataset="pairs.jsonl", beta=0.2).train()`."""

    algorithm = "dpo"


class KTOTrainer(_Trainer):
    """Learns from single dialogues in `dataset` that are labelled good or bad."""

    algorithm = "kto"


class RewardModelTrainer(_Trainer):
    """Learns to score dialogues from pairs in `dataset`, or with `kind="process"` their turns from labels."""

    algorithm = "reward_model"


def _sections() -> dict[str, set[str]]:
    """The keys of each section."""
    fields = {name: field.annotation for name, field in TrainingConfig.model_fields.items()}
    return {
        name: set(kind.model_fields)
        for name, kind in fields.items()
        if isinstance(kind, type) and issubclass(kind, Section)
    }


def placed(options: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """The options with plain keys moved into their sections: that of the algorithm first, or the one section of the
    common ones that has the key. What is no key of any section stays, for the config to refuse."""
    given = {key: dict(value) if isinstance(value, Mapping) else value for key, value in options.items()}
    given |= {key: {SHORT[key]: given[key]} for key in SHORT if isinstance(given.get(key), str | Path)}
    others = {kind.algorithm for kind in _Trainer.__subclasses__()} - {algorithm}
    sections = {name: keys for name, keys in _sections().items() if name not in others}
    for key in [key for key in given if key not in ALIASES and key not in TrainingConfig.model_fields]:
        homes = (
            [algorithm] if key in sections[algorithm] else [n for n, keys in sections.items() if key in keys]
        )
        if len(homes) > 1:
            several = " or ".join(f"{home}={{{key!r}: ...}}" for home in homes)
            raise ValueError(f"{key} is an option of {' and of '.join(homes)}; write {several}")
        if homes:
            into(given, homes[0], {key: given.pop(key)})
    return given


def into(given: dict[str, Any], section: str, keys: Mapping[str, Any]) -> None:
    """Adds keys to those of a section that are there already."""
    there = given.setdefault(section, {})
    if not isinstance(there, dict):
        return  # no section, which the config tells better
    if twice := sorted(there.keys() & keys.keys()):
        raise ValueError(
            f"{', '.join(twice)} is given twice, by itself and in {section}; leave one of them out"
        )
    there |= keys


def _rows(source: Any) -> Any:
    """Rows that are handed in as objects, and can be read again."""
    return (
        None if isinstance(source, str | Path) else list(source) if isinstance(source, Iterator) else source
    )


def _about_objects(config: TrainingConfig, objects: Objects) -> list[str]:
    here = "a reward that is a Python object runs in this process; to run it elsewhere, name it: reward.type=function"
    asked = config.optimization.distributed_reward and objects.reward is not None
    return [f"optimization.distributed_reward: {here}"] if asked else []


def _about_allocation(allocation_id: str | None) -> list[str]:
    where = "ComputeFactory is not connected yet; training runs on this machine"
    return [] if allocation_id is None else [f"allocation_id {allocation_id}: {where}"]


def _take_reward(reward: Any, given: dict[str, Any], objects: Objects) -> None:
    """Puts its type among the options, or the callable among the objects."""
    if callable(reward):
        objects.reward = as_reward(reward)
    elif isinstance(reward, str):
        given["reward_function"] = reward
    elif reward is not None:
        raise ValueError(
            f"reward_function is {reward!r:.60}; it takes one callable, or the name of a reward type such as "
            "rule_based. Several become one by Combined({name: (weight, reward)}) of "
            "TrainingFactory.rewards.combined, or in a config by reward.parts"
        )


def _take_environment(environment: Any, given: dict[str, Any], objects: Objects) -> list[Any]:
    """Puts it among the options, or as an object in the place of whatever a config names; the tools it brings."""
    if isinstance(environment, Mapping):
        into(given, "environment", {key: value for key, value in environment.items() if key != "tools"})
        return listed(environment.get("tools", ()))
    if isinstance(environment, str | Path):
        into(given, "environment", {"environment_id": environment})
    elif environment is not None:
        into(given, "environment", {"environment_id": None})
        objects.environment = environment
    return []


def _model_section(model: Any) -> Mapping[str, Any]:
    if isinstance(model, Mapping):
        return model
    if isinstance(model, str | Path):
        return {"name": model}
    from TrainingFactory.models.faces import ModelFace  # torch, which whoever has one of these has already

    if not isinstance(model, ModelFace):
        raise ValueError(
            f"model is a {type(model).__name__}; give a name, a folder, or one of TrainingFactory.models, such as "
            'Qwen3Model("qwen3-4b")'
        )
    return model.section


def merged(config: TrainingConfig | None, options: dict[str, Any]) -> TrainingConfig:
    """The config with the options over it."""
    full = config.model_dump(exclude_unset=True) if config is not None else {}
    for section, keys in expand(options).items():
        together = isinstance(keys, Mapping) and isinstance(full.get(section), Mapping)
        full[section] = full[section] | keys if together else keys
    return TrainingConfig(**full)
