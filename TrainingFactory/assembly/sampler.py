"""The model of a config, its chat format, its sampler, and the rollout engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.agent_api.agent_program import AgentProgram, ProgramRollouts
from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.endpoint_rollouts import (
    EndpointRollouts,
    EndpointSampler,
    TextFormat,
    reject_endpoint,
)
from TrainingFactory.assembly.fleet import (
    Notify,
    check_engines,
    get_max_concurrent_episodes,
    make_serving_fleet,
    make_training_fleet,
    samples_elsewhere,
)
from TrainingFactory.assembly.folding import DEFAULT_MAX_LENGTH, make_folding
from TrainingFactory.assembly.learner import copy_model, make_policy, make_trainable
from TrainingFactory.assembly.rewards import uses_environment_reward
from TrainingFactory.assembly.vision import check_vision
from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.common.endpoints.names import find_endpoint, is_endpoint
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.envs.self_play import is_self_play
from TrainingFactory.protocols import Algorithm, ChatFormat, EnvironmentFactory, RewardFunction, Sampler
from TrainingFactory.resolve.factories import add_searched_places
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.rollout.branching import Branching
from TrainingFactory.rollout.self_play import SelfPlayRollouts
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import SamplingParams, Trajectory

if TYPE_CHECKING:
    from TrainingFactory.learning.policy import LocalPolicy
    from TrainingFactory.models import LoadedModel, TemplateChatFormat
    from TrainingFactory.sampling import NativeEngine


def load(config: TrainingConfig, notify: Notify = lambda _: None) -> LoadedModel:
    """Load the model of a config, and apply `model.tools_format`. `notify` reports the changes that the format makes,
    and the parts of a composite model that were not loaded."""
    # Imported here, because torch and transformers take seconds, and errors in names should not wait for them.
    from TrainingFactory.models import load_model

    model = config.model
    if is_endpoint(model.name):
        reject_endpoint(model.name)
    check_vision(config)
    with add_searched_places("models"):
        loaded_model = load_model(
            model.name,
            dtype=model.dtype,
            device=model.device,
            adapter=model.adapter,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            quantization=model.quantization,
            chat_template=model.chat_template,
            vision=model.vision,
            image_tokens=model.image_tokens,
        )
    vision_notes = loaded_model.vision.notes if loaded_model.vision is not None else []
    for note in (*loaded_model.notes, *vision_notes):
        notify(f"note: {note}")
    if model.tools_format is not None:
        from TrainingFactory.models.tools_format import add_tools_format

        is_frozen = config.lora.enabled or model.adapter is not None or model.quantization != "none"
        add_tools_format(loaded_model, model.tools_format, is_frozen, notify)
    context_limit = get_context_limit(loaded_model)
    if model.max_length is not None and context_limit is not None and model.max_length > context_limit:
        raise ValueError(
            f"model.max_length is {model.max_length}, but the context of {model.name} has {context_limit} tokens"
        )
    return loaded_model


def check_chat_template(config: TrainingConfig) -> str | None:
    """Return the text of `model.chat_template`, None if it is not set; raise ConfigError if it cannot be used."""
    if config.model.chat_template is None:
        return None
    from TrainingFactory.models.templates import read_template

    try:
        return read_template(config.model.chat_template)
    except ValueError as error:
        raise config.wrong([Problem(("model", "chat_template"), str(error))]) from error


def load_trainable(config: TrainingConfig, notify: Notify = lambda _: None) -> LoadedModel:
    """Load the model to train: on the CPU for several learners, which each take their share of its weights."""
    from TrainingFactory.models.dtypes import pick_device, pick_dtype

    model = config.model
    if (config.compute.learners or 1) > 1:
        dtype = str(pick_dtype(model.dtype, pick_device(model.device))).removeprefix("torch.")
        model = model.model_copy(update={"device": "cpu", "dtype": dtype})
    loaded_model = load(config.model_copy(update={"model": model}), notify)
    make_trainable(config, loaded_model)
    return loaded_model


def get_context_limit(loaded_model: LoadedModel) -> int | None:
    config = loaded_model.model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None)  # foreign object


def make_chat(
    config: TrainingConfig,
    loaded_model: LoadedModel,
    day: date | None = None,
    notify: Notify = lambda _: None,
) -> TemplateChatFormat:
    """Make the chat format and report template problems with `notify`. `day` is the date that templates print; a run
    keeps the day of its start."""
    from TrainingFactory.models import chat_format

    model = config.model
    chat = chat_format(
        loaded_model.tokenizer, model.family, thinking=model.thinking, stop_ids=loaded_model.stop_ids, day=day,
        vision=loaded_model.vision,
    )  # fmt: skip
    if chat.note:
        notify(chat.note)
    if chat.warning:
        notify(f"warning: {chat.warning}")
    return chat


def make_engine(
    config: TrainingConfig,
    loaded_model: LoadedModel,
    num_episodes: int,
    samples_ahead: bool = False,
    gathered_model: Any = None,
    needs: Set[str] | None = None,
) -> NativeEngine:
    """Make the native engine. With `samples_ahead` it samples from its own copy of the weights, because the model is
    trained meanwhile. With `gathered_model` it uses that object's whole model, because the learner's is sharded.
    `needs` are the algorithm's inputs; set them if a learner shares the device, to limit the KV cache."""
    from TrainingFactory.assembly.memory import GIB, compute_cache_limit
    from TrainingFactory.sampling import NativeEngine

    engine_model = (
        copy_model(loaded_model.model) if samples_ahead and gathered_model is None else loaded_model.model
    )
    context_length, cache_gib = get_max_length(config, loaded_model), config.sampling.cache_gib
    cache_bytes = None if cache_gib is None else int(cache_gib * GIB)
    if needs is not None and gathered_model is None and loaded_model.model.device.type == "cuda":
        cache_bytes = compute_cache_limit(config, loaded_model.model, needs, context_length)
    return NativeEngine(
        engine_model if gathered_model is None else gathered_model.model,
        source=gathered_model or (loaded_model.model if samples_ahead else None),
        slots=min(config.sampling.slots, num_episodes),
        max_length=context_length,
        deterministic=config.sampling.deterministic,
        cache_bytes=cache_bytes,
        vision=loaded_model.vision,
    )


def make_training_sampler(
    config: TrainingConfig, loaded_model: LoadedModel, policy: LocalPolicy, episodes: int, samples_ahead: bool,
    notify: Notify,
    logs: Path,
) -> Sampler:  # fmt: skip
    """Make the sampler of a training run: an engine that shares the policy's weights, or engines in other processes
    that load published weights and log into the folder `logs`."""
    publisher = policy.publisher
    if publisher is None or not publisher.model_folder:
        return make_engine(config, loaded_model, episodes, samples_ahead, publisher, policy.algorithm.needs)
    length = get_max_length(config, loaded_model)
    return make_training_fleet(config, publisher, length, episodes, notify, logs)


def make_publishing_policy(
    config: TrainingConfig, loaded_model: LoadedModel, algorithm: Algorithm, num_steps: int, has_episodes: bool,
    full_model: Any = None
) -> LocalPolicy:  # fmt: skip
    """Make the policy of this process. If the run samples (`has_episodes`) with engines that cannot share the policy's
    weights, the policy publishes them: into folders for engines in other processes, or, if the learner is sharded, to
    an engine in this process that has the `full_model`."""
    is_sharded = (config.compute.learners or 1) > 1
    policy = make_policy(config, loaded_model, algorithm, num_steps, is_sharded)
    if not (
        has_episodes and (KINDS[config.training.algorithm].samples or config.training.eval_every is not None)
    ):
        return policy
    if samples_elsewhere(config):
        from TrainingFactory.learning.publishing import Publisher

        policy.publisher = Publisher(policy.learner, publish_adapters=config.sampling.engine == "vllm")
    elif is_sharded:
        from TrainingFactory.cluster.ranks import GatheringPublisher

        policy.publisher = GatheringPublisher(policy.learner, full_model)
    return policy


def get_max_length(config: TrainingConfig, loaded_model: LoadedModel) -> int:
    return config.model.max_length or min(
        get_context_limit(loaded_model) or DEFAULT_MAX_LENGTH, DEFAULT_MAX_LENGTH
    )


def make_sampler(
    config: TrainingConfig, num_episodes: int, notify: Notify = lambda _: None
) -> tuple[ChatFormat, Sampler]:
    """Load the model; return its chat format and a sampler. A model behind an endpoint has an `EndpointSampler`."""
    if is_endpoint(config.model.name):
        return TextFormat(), EndpointSampler(find_endpoint(config.model.name))
    chat, sampler, _ = make_sampler_and_model(config, num_episodes, notify)
    return chat, sampler


def make_sampler_and_model(
    config: TrainingConfig, num_episodes: int, notify: Notify = lambda _: None
) -> tuple[Any, Sampler, Any]:
    """Load the model; return its chat format, a sampler, and the model if the engine runs in this process, else
    None."""
    check_engines(config)
    loaded_model = load(config, notify)
    chat = make_chat(config, loaded_model, notify=notify)
    if samples_elsewhere(config):
        max_length = get_max_length(config, loaded_model)
        return chat, make_serving_fleet(config, loaded_model, max_length, num_episodes, notify), None
    return chat, make_engine(config, loaded_model, num_episodes), loaded_model.model


def make_rollouts(
    config: TrainingConfig,
    environment: EnvironmentFactory,
    chat: ChatFormat,
    on_episode: Callable[[Trajectory], None] | None = None,
    reward: RewardFunction | None = None,
    runtime: ToolRuntime | None = None,
    gate: asyncio.Semaphore | None = None,
    sampler: Sampler | None = None,
    branching: Branching | None = None,
) -> RolloutEngine:
    """Make the rollout engine. The episodes' clock stops while no engine of `sampler` is alive. `branching` is for
    training only."""
    sampling = config.sampling
    folding = make_folding(config, None if sampler is None else sampler.max_length)
    sampling_params = SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )
    engine: type[RolloutEngine] = ProgramRollouts if isinstance(environment, AgentProgram) else RolloutEngine
    if isinstance(environment, AgentProgram) and not uses_environment_reward(reward):
        environment = environment.without_scoring()
    concurrency: int | None = get_max_concurrent_episodes(config, environment)
    if isinstance(sampler, EndpointSampler):
        if engine is ProgramRollouts:
            raise ValueError("environment.command needs a model with tokens, not an endpoint. Name a model")
        engine, concurrency = EndpointRollouts, sampler.settings.concurrency
    if is_self_play(environment):
        if engine is EndpointRollouts:
            raise ValueError(f"self-play ({environment.__name__}) needs a model with tokens, not an endpoint")
        engine = SelfPlayRollouts
    return engine(
        environment,
        chat,
        sampling_params,
        reward=reward,
        max_turns=config.environment.max_turns,
        episode_timeout=config.environment.episode_timeout,
        max_reply_tokens=sampling.max_reply_tokens,
        max_concurrency=concurrency,
        seed=config.training.seed,
        on_episode=on_episode,
        runtime=runtime,
        gate=gate,
        clock=sampler.clock if isinstance(sampler, Fleet) else None,
        folding=folding,
        branching=branching,
    )
