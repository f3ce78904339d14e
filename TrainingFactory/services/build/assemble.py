"""The one place where names become objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from TrainingFactory import catalog
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import (
    ChatFormat,
    EnvironmentFactory,
    RewardFunction,
    Sampler,
)
from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.services.build.user_code import environment_from_file
from TrainingFactory.tools.python_files import is_file_name, told
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from TrainingFactory.models import LoadedModel, TemplateChatFormat
    from TrainingFactory.sampling import NativeEngine

DEFAULT_TASKS = 16
TRAINING_TASKS = 1000
DEFAULT_MAX_LENGTH = 4096


def make_environment(config: TrainingConfig, with_tools: bool = False) -> EnvironmentFactory:
    """`with_tools`: tools are handed to the run, which then needs no environment of its own."""
    name = config.environment.environment_id
    if name is not None:
        return environment_from_file(name) if is_file_name(name) else catalog.find("environment", name)
    if with_tools:
        return ToolEnvironment  # a plain conversation
    known = ", ".join(name for name, alias in catalog.names("environment").items() if alias is None)
    raise ValueError(f"no environment is named; give one of {known}, or a Python file such as weather.py")


def make_tasks(
    config: TrainingConfig, environment: EnvironmentFactory, default_count: int = DEFAULT_TASKS
) -> list[Task]:
    """From a file, or `default_count` of the environment's own where the config does not say how many."""
    data = config.data
    if data.tasks is not None:
        return load_tasks(Path(data.tasks).expanduser())[: data.count]
    name = config.environment.environment_id or environment_name(environment)
    if name == ToolEnvironment.__name__:
        raise ValueError(
            "tools without an environment make a plain conversation, and its tasks come from a file: "
            "data.tasks=FILE.jsonl, with a prompt and an answer in each line"
        )
    return own_tasks(environment, name, data.split, data.seed, data.count or default_count)


def make_heldout_tasks(
    config: TrainingConfig, environment: EnvironmentFactory, path: str | None
) -> list[Task]:
    """The tasks for evaluation during training: of a file, or the environment's own."""
    data = config.data
    if path is not None:
        return load_tasks(Path(path).expanduser())[: data.heldout_count]
    name = config.environment.environment_id or environment_name(environment)
    if name == ToolEnvironment.__name__:
        raise ValueError("held-out tasks of a plain conversation come from a file: data.heldout=FILE.jsonl")
    return own_tasks(environment, name, "heldout", data.seed, data.heldout_count)


def own_tasks(environment: EnvironmentFactory, name: str, split: str, seed: int, count: int) -> list[Task]:
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


def environment_name(environment: EnvironmentFactory) -> str:
    return getattr(environment, "__name__", type(environment).__name__)  # a class, or an object of the user's


def load(config: TrainingConfig) -> LoadedModel:
    # Imported here: torch and transformers take seconds, and mistakes in names should not wait for them.
    from TrainingFactory.models import load_model

    model = config.model
    loaded = load_model(
        model.name,
        dtype=model.dtype,
        device=model.device,
        adapter=model.adapter,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        quantization=model.quantization,
    )
    limit = context_limit(loaded)
    if model.max_length is not None and limit is not None and model.max_length > limit:
        raise ValueError(f"model.max_length is {model.max_length}, but {model.name} was made for {limit}")
    return loaded


def context_limit(loaded: LoadedModel) -> int | None:
    config = loaded.model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None)  # foreign object


def make_chat(config: TrainingConfig, loaded: LoadedModel, day: date | None = None) -> TemplateChatFormat:
    """`day` is for templates that print the date; a run keeps the one it started with."""
    from TrainingFactory.models import chat_format

    model = config.model
    return chat_format(
        loaded.tokenizer, model.family, thinking=model.thinking, stop_ids=loaded.stop_ids, day=day
    )


def make_engine(config: TrainingConfig, loaded: LoadedModel, episodes: int) -> NativeEngine:
    from TrainingFactory.sampling import NativeEngine

    return NativeEngine(
        loaded.model,
        slots=min(config.sampling.slots, episodes),
        max_length=max_length(config, loaded),
        deterministic=config.sampling.deterministic,
    )


def max_length(config: TrainingConfig, loaded: LoadedModel) -> int:
    return config.model.max_length or min(context_limit(loaded) or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH)


def make_sampler(config: TrainingConfig, episodes: int) -> tuple[ChatFormat, Sampler]:
    """The model's way to write a conversation, and the engine that samples from it."""
    loaded = load(config)
    return make_chat(config, loaded), make_engine(config, loaded, episodes)


def make_rollouts(
    config: TrainingConfig,
    environment: EnvironmentFactory,
    chat: ChatFormat,
    on_episode: Callable[[Trajectory], None] | None = None,
    reward: RewardFunction | None = None,
    runtime: ToolRuntime | None = None,
) -> AsyncRolloutEngine:
    sampling = config.sampling
    params = SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )
    return AsyncRolloutEngine(
        environment,
        chat,
        params,
        reward=reward,
        max_turns=config.environment.max_turns,
        episode_timeout=config.environment.episode_timeout,
        max_reply_tokens=sampling.max_reply_tokens,
        max_concurrency=sampling.slots,  # an episode's clock starts when there is a slot for it
        seed=config.training.seed,
        on_episode=on_episode,
        runtime=runtime,
    )
