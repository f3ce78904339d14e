"""The trainers for Python: what can be named by text, or be handed in as objects, and `.train()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig, notices
from TrainingFactory.config.names import expand
from TrainingFactory.data.conversations import Conversation, checked
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.openai_form import message_from_dict, spec_from_dict
from TrainingFactory.protocols import RewardFunction, Tool
from TrainingFactory.services.runs import RunFolder
from TrainingFactory.services.tracking import PlainLines, Watcher
from TrainingFactory.services.training import Objects, Training, TrainingReport
from TrainingFactory.types import Task


class _Trainer:
    algorithm: str

    def __init__(
        self,
        model: Any = None,
        environment: Any = None,
        reward_function: RewardFunction | str | None = None,
        *,
        tools: Sequence[Tool] = (),
        tasks: Sequence[Task] | str | Path | None = None,
        dataset: Sequence[Mapping[str, Any]] | str | Path | None = None,
        config: TrainingConfig | None = None,
        name: str | None = None,
        resume: bool = False,
        watcher: Watcher | None = None,
        **options: Any,
    ) -> None:
        """`model` is a name or one of `TrainingFactory.models`; `environment` a name, a Python file, a class, or
        a section of the config. With `tools` and `tasks` alone there is a plain conversation with those tools.
        `options` are keys of the config in short form (`learning_rate=1e-5`, `use_lora=True`) or sections of it
        (`sampling={"max_tokens": 64}`); they go before `config`. `resume=True` goes on with the run `name`."""
        given: dict[str, Any] = dict(options)
        given["training"] = dict(given.get("training", {})) | {"algorithm": self.algorithm}
        given["data"] = dict(given.get("data", {}))
        objects = Objects(conversations=_conversations(dataset))
        if model is not None:
            given["model"] = model if isinstance(model, str | Path | Mapping) else model.name
        if callable(reward_function):
            objects.reward = reward_function
        elif reward_function is not None:
            given["reward_function"] = reward_function
        if isinstance(environment, str | Path | Mapping):
            named = isinstance(environment, str | Path)
            section: dict[str, Any] = {"environment_id": environment} if named else dict(environment)
            tools = section.pop("tools", tools)
            given["environment"] = section
        else:
            objects.environment = environment
        if isinstance(tasks, str | Path):
            given["data"]["tasks"] = tasks
        elif tasks is not None:
            objects.tasks = list(tasks)
        if isinstance(dataset, str | Path):
            given["data"]["demonstrations"] = dataset
        self.config = merged(config, given)
        if tools:
            objects.environment = _with_tools(objects.environment, self.config, tools)
        self.objects = objects
        self._name, self._resume = name, resume
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
        return Training(config, name=self._name, run=run, objects=self.objects, watcher=self._watcher).train()


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


def _with_tools(environment: Any, config: TrainingConfig, tools: Sequence[Tool]) -> Any:
    """The environment with tools added; without one, a plain conversation with these tools."""
    from TrainingFactory.services.assemble import make_environment

    if environment is None and config.environment.environment_id is not None:
        environment = make_environment(config)
    base: Any = environment or ToolEnvironment
    if not isinstance(base, type) or not issubclass(base, ToolEnvironment):
        raise ValueError("tools can be added to a ToolEnvironment; this environment brings its own")
    if wrong := next((tool for tool in tools if not isinstance(tool, Tool)), None):
        raise ValueError(f"{wrong!r} is no tool; put @tool (from TrainingFactory.tools) over the function")
    given: Callable[..., None] = base.__init__

    class WithTools(base):
        def __init__(self, task: Task) -> None:
            given(self, task, tools)

    WithTools.__name__ = base.__name__
    return WithTools
