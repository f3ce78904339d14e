"""The trainers for Python: what can be named by text, or be handed in as objects, and `.train()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig, notices
from TrainingFactory.config.names import expand
from TrainingFactory.data.conversations import Conversation, checked
from TrainingFactory.openai_form import message_from_dict, spec_from_dict
from TrainingFactory.protocols import RewardFunction
from TrainingFactory.services.runs import RunFolder
from TrainingFactory.services.tool_sets import listed
from TrainingFactory.services.tracking import PlainLines, Watcher
from TrainingFactory.services.training import Objects, Training, TrainingReport
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
        dataset: Sequence[Mapping[str, Any]] | str | Path | None = None,
        config: TrainingConfig | None = None,
        name: str | None = None,
        resume: bool = False,
        replay: str | Path | None = None,
        watcher: Watcher | None = None,
        **options: Any,
    ) -> None:
        """`model` is a name or one of `TrainingFactory.models`; `environment` a name, a Python file, a class, or
        a section of the config. `tools` are added to those of the environment: tools, typed functions, `MCPTools` and
        other sources, or names; several or one. With `tools` and `tasks` alone there is a plain conversation.
        `options` are keys of the config in short form (`learning_rate=1e-5`, `use_lora=True`) or sections of it
        (`sampling={"max_tokens": 64}`); they go before `config`; `tool_cache` may be a `ToolCache` too. `resume=True`
        goes on with the run `name`; `replay` names a run whose recorded tool calls are served again."""
        given: dict[str, Any] = dict(options)
        given["training"] = dict(given.get("training", {})) | {"algorithm": self.algorithm}
        given["data"] = dict(given.get("data", {}))
        objects = Objects(conversations=_conversations(dataset))
        if isinstance(given.get("tool_cache"), ToolCache):
            objects.cache = given.pop("tool_cache")
        if model is not None:
            given["model"] = model if isinstance(model, str | Path | Mapping) else model.name
        if callable(reward_function):
            objects.reward = reward_function
        elif reward_function is not None:
            given["reward_function"] = reward_function
        if isinstance(environment, str | Path):
            given["environment"] = {"environment_id": environment}
        elif isinstance(environment, Mapping):
            given["environment"] = {key: value for key, value in environment.items() if key != "tools"}
            tools = environment.get("tools", tools)
        else:
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
        self.objects = objects
        self._name, self._resume, self._replay = name, resume, replay
        self._watcher = watcher or PlainLines()

    def train(self) -> TrainingReport:
        for text in notices(self.config):
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


class SFTTrainer(_Trainer):
    """Learns from demonstrations: those in `dataset` (a JSONL file, or OpenAI-style conversations), or those that
    the environment's own expert plays."""

    algorithm = "sft"


def merged(config: TrainingConfig | None, options: dict[str, Any]) -> TrainingConfig:
    """The config with the options over it."""
    full = config.model_dump(exclude_unset=True) if config is not None else {}
    for section, keys in expand(options).items():
        together = isinstance(keys, Mapping) and isinstance(full.get(section), Mapping)
        full[section] = full[section] | keys if together else keys
    return TrainingConfig(**full)


def _conversations(dataset: Any) -> list[Conversation] | None:
    if dataset is None or isinstance(dataset, str | Path):
        return None
    found = []
    for number, row in enumerate(dataset):
        if not isinstance(row, Mapping) or "messages" not in row:
            keys = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            raise ValueError(f'row {number} of the dataset needs "messages"; its keys are: {keys}')
        try:
            messages = checked([message_from_dict(message) for message in row["messages"]])
        except ValueError as error:
            raise ValueError(f"row {number} of the dataset {error}") from error
        specs = [spec_from_dict(tool) for tool in row.get("tools") or []]
        found.append(Conversation(str(row.get("id", number)), messages, specs))
    if not found:
        raise ValueError("the dataset is empty")
    return found
