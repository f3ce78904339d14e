"""The one place where names become objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.schema import ToolEntry
from TrainingFactory.protocols import (
    ChatFormat,
    EnvironmentFactory,
    RewardFunction,
    Sampler,
    ToolSource,
)
from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.services.build.tool_sets import (
    Chosen,
    Handed,
    ToolSet,
    cacheable,
    chosen_names,
    filled_in,
    own_tools,
)
from TrainingFactory.services.build.user_code import tools_from_file
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.tools.builtin.making import make_tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import SamplingParams, Trajectory
from TrainingFactory.user_code import is_file_name

if TYPE_CHECKING:
    from TrainingFactory.models import LoadedModel, TemplateChatFormat
    from TrainingFactory.sampling import NativeEngine

DEFAULT_MAX_LENGTH = 4096


def make_tools(
    config: TrainingConfig, given: Sequence[Any] = (), environment: EnvironmentFactory | None = None
) -> ToolSet:
    """The tools of the config and those given as objects. An entry that only names a tool which the environment
    brings itself adds nothing."""
    own, opened = own_tools(environment), set[str]()
    made = ToolSet(given=[as_tool(value) for value in given])
    try:
        for number, entry in enumerate(config.tools):
            if entry.config is not None and entry.config not in opened:
                opened.add(entry.config)
                made.made.append(_from_servers(entry.config, config.tools))
            elif entry.config is None and (entry.options or entry.name not in own):
                made.made += _tools_of(entry, f"tools.{number}")
    except BaseException:
        made.close()
        raise
    return made


def _tools_of(entry: ToolEntry, where: str) -> list[Handed]:
    """A built-in tool, one of an installed package, or those of a Python file."""
    if not is_file_name(entry.name):
        made: list[Handed] = [_built_in(entry, where)]
    elif entry.options:
        raise ValueError(f"{where}.options are for built-in tools; {entry.name} is a Python file")
    else:
        made = list(tools_from_file(entry.name))
    if not entry.cache_enabled:
        return made
    return [
        Chosen(tool, None, cached=None) if isinstance(tool, ToolSource) else cacheable(tool) for tool in made
    ]


def _built_in(entry: ToolEntry, where: str) -> Handed:
    try:
        return make_tool({"name": entry.name, "options": filled_in(entry.options, "options")})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _from_servers(path: str, entries: Sequence[ToolEntry]) -> ToolSource:
    """What all entries with this file want of it, over one set of connections."""
    from TrainingFactory.tools import MCPTools

    source = MCPTools.load_from_config(Path(path).expanduser())
    try:
        offered = ToolSet([source]).offered()
        taken, cached = set[str](), set[str]()
        for number, entry in enumerate(entries):
            if entry.config != path:
                continue
            if entry.options:
                raise ValueError(f"tools.{number}.options are for built-in tools; a server's stand in {path}")
            names = chosen_names(entry.name, offered, f"tools.{number}", path)
            taken |= names
            cached |= names if entry.cache_enabled else set()
    except BaseException:
        source.close()
        raise
    return Chosen(source, taken, cached)


def make_tool_cache(config: TrainingConfig) -> ToolCache | None:
    """One for all runs of the folder. It is on for all tools that are marked pure or stateful as soon as anybody
    asks for it; an entry that does also marks its own tools."""
    wanted = config.optimization.tool_cache
    if not wanted and not any(entry.cache_enabled for entry in config.tools):
        return None
    if isinstance(wanted, str) and wanted:
        target = filled_in({"tool_cache": wanted}, "optimization")["tool_cache"]
        return ToolCache(os.path.expanduser(target))
    folder = Path(config.logging.output_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return ToolCache(folder / "tool_cache.sqlite")


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
