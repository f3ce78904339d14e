"""The one place where names become objects."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from TrainingFactory import catalog
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.protocols import ChatFormat, EnvironmentFactory, Sampler
from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.services.user_code import environment_from_file, is_file_name, told
from TrainingFactory.types import SamplingParams, Task, Trajectory

DEFAULT_TASKS = 16
DEFAULT_MAX_LENGTH = 4096


def make_environment(config: TrainingConfig) -> EnvironmentFactory:
    name = config.environment.environment_id
    if name is None:
        known = ", ".join(name for name, alias in catalog.names("environment").items() if alias is None)
        raise ValueError(f"no environment is named; give one of {known}, or a Python file such as weather.py")
    return environment_from_file(name) if is_file_name(name) else catalog.find("environment", name)


def make_tasks(config: TrainingConfig, environment: EnvironmentFactory) -> list[Task]:
    data = config.data
    if data.tasks is not None:
        return load_tasks(Path(data.tasks).expanduser())[: data.count]
    count = data.count or DEFAULT_TASKS
    try:
        tasks = list(islice(environment.tasks(data.split, data.seed, count), count))
    except Exception as error:  # foreign code
        raise told(error) from error
    name = config.environment.environment_id
    if not tasks:
        raise ValueError(f"environment {name} made no task for split {data.split!r} and seed {data.seed}")
    if wrong := next((task for task in tasks if not isinstance(task, Task)), None):
        raise ValueError(f"environment {name} must make Task objects, not {type(wrong).__name__}")
    ids = [task.id for task in tasks]
    if twice := sorted({task_id for task_id in ids if ids.count(task_id) > 1}):
        raise ValueError(f"environment {name} gave several tasks the same id: {', '.join(twice[:5])}")
    return tasks


def make_sampler(config: TrainingConfig, episodes: int) -> tuple[ChatFormat, Sampler]:
    """The model's way to write a conversation, and the engine that samples from it."""
    # Imported here: torch and transformers take seconds, and mistakes in names should not wait for them.
    from TrainingFactory.models import chat_format, load_model
    from TrainingFactory.sampling import NativeEngine

    model = config.model
    loaded = load_model(
        model.name,
        dtype=model.dtype,
        device=model.device,
        adapter=model.adapter,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )
    chat = chat_format(loaded.tokenizer, model.family, thinking=model.thinking, stop_ids=loaded.stop_ids)
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)  # foreign object
    if model.max_length is not None and limit is not None and model.max_length > limit:
        raise ValueError(f"model.max_length is {model.max_length}, but {model.name} was made for {limit}")
    engine = NativeEngine(
        loaded.model,
        slots=min(config.sampling.slots, episodes),
        max_length=model.max_length or min(limit or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH),
        deterministic=config.sampling.deterministic,
    )
    return chat, engine


def make_rollouts(
    config: TrainingConfig,
    environment: EnvironmentFactory,
    chat: ChatFormat,
    on_episode: Callable[[Trajectory], None] | None = None,
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
        max_turns=config.environment.max_turns,
        episode_timeout=config.environment.episode_timeout,
        max_reply_tokens=sampling.max_reply_tokens,
        max_concurrency=sampling.slots,  # an episode's clock starts when there is a slot for it
        seed=config.training.seed,
        on_episode=on_episode,
    )
