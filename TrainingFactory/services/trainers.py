"""The trainers for Python: what can be named by text, or be handed in as objects, and `.train()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig, notices
from TrainingFactory.config.names import ALIASES, expand
from TrainingFactory.config.section import Section
from TrainingFactory.protocols import RewardFunction
from TrainingFactory.services.gathering import Objects, read_examples
from TrainingFactory.services.runs import RunFolder
from TrainingFactory.services.tool_sets import listed
from TrainingFactory.services.tracking import PlainLines, Watcher
from TrainingFactory.services.training import Training, TrainingReport
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.tool_cache import ToolCache
from TrainingFactory.types import Task


class _Trainer:
    algorithm: str

    def __init__(
        self,
        model: Any = None,
        environment: Any = None,
        reward_function: RewardFunction | str | None = None,
        *,
        tools: Any = (),
        tasks: Sequence[Task] | str | Path | None = None,
        dataset: Any = None,
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
        plain conversation. `dataset` is a file, a hub id, or rows as Python objects.

        `options` are keys of the config in short form (`learning_rate=1e-5`, `use_lora=True`, and those of the
        algorithm: `DPOTrainer(beta=0.2)`) or sections of it (`sampling={"max_tokens": 64}`); they go before `config`;
        `tool_cache` may be a `ToolCache` too. `resume=True` goes on with the run `name`; `replay` names a run whose
        recorded tool calls are served again. `allocation_id` is for machines of a ComputeFactory."""
        given = placed(options, self.algorithm)
        given["training"] = dict(given.get("training", {})) | {"algorithm": self.algorithm}
        given["data"] = dict(given.get("data", {}))
        objects = Objects()
        if isinstance(given.get("tool_cache"), ToolCache):
            objects.cache = given.pop("tool_cache")
        if model is not None:
            given["model"] = model if isinstance(model, str | Path | Mapping) else _section_of(model)
        if callable(reward_function):
            objects.reward = reward_function
        elif reward_function is not None:
            given["reward_function"] = reward_function
        given |= _environment_section(environment)
        if isinstance(environment, Mapping):
            tools = [*listed(environment.get("tools", ())), *listed(tools)]
        elif "environment" not in given:
            objects.environment = environment
        if isinstance(tasks, str | Path):
            given["data"]["tasks"] = tasks
        elif tasks is not None:
            objects.tasks = list(tasks)
        if isinstance(dataset, str | Path):
            given["data"]["dataset"] = dataset
        tools = listed(tools)
        if named := [entry for entry in tools if isinstance(entry, str | Mapping)]:
            given["tools"] = named
        objects.tools = [as_tool(entry) for entry in tools if not isinstance(entry, str | Mapping)]
        self.config = merged(config, given)
        if dataset is not None and not isinstance(dataset, str | Path):
            objects.examples = read_examples(self.config, dataset)
        self.objects = objects
        self._name, self._resume, self._replay = name, resume, replay
        self._watcher = watcher or PlainLines()
        self.notices = [*notices(self.config), *_about_allocation(allocation_id)]

    def train(self) -> TrainingReport:
        for text in self.notices:
            self._watcher.say(f"note: {text}")
        run = None
        if self._resume:
            if self._name is None:
                raise ValueError("resume=True goes on with a run, so it needs its name: name=...")
            run = RunFolder.find(self._name, self.config.logging.output_dir)
        config = run.config if run is not None else self.config
        if config != self.config:
            self._watcher.say(
                f"note: the options of this trainer are not those of run {self._name}; the run keeps its own"
            )
        training = Training(
            config, name=self._name, run=run, objects=self.objects, watcher=self._watcher, replay=self._replay
        )
        return training.train()


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
            section = given.setdefault(homes[0], {})
            if not isinstance(section, dict) or key in section:
                raise ValueError(f"{key} is given twice, by itself and in {homes[0]}; leave one of them out")
            section[key] = given.pop(key)
    return given


def _about_allocation(allocation_id: str | None) -> list[str]:
    where = "ComputeFactory is not connected yet; training runs on this machine"
    return [] if allocation_id is None else [f"allocation_id {allocation_id}: {where}"]


def _environment_section(environment: Any) -> dict[str, Any]:
    if isinstance(environment, str | Path):
        return {"environment": {"environment_id": environment}}
    if isinstance(environment, Mapping):
        return {"environment": {key: value for key, value in environment.items() if key != "tools"}}
    return {}


def _section_of(model: Any) -> dict[str, Any]:
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
