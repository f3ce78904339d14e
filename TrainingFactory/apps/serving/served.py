"""A loaded model that serves requests, and the config to load it with."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from TrainingFactory.assembly.fleet import Notify, get_max_open_episodes
from TrainingFactory.assembly.folding import make_folding
from TrainingFactory.assembly.sampler import make_sampler_and_model
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.evaluation.evaluation import make_sections
from TrainingFactory.protocols import Sampler
from TrainingFactory.resolve.factories import resolve_ids
from TrainingFactory.resolve.model_names import ResolvedModel
from TrainingFactory.rollout.folding import Folding
from TrainingFactory.types import SamplingParams

if TYPE_CHECKING:
    from TrainingFactory.models import TemplateChatFormat


@dataclass(slots=True, eq=False, weakref_slot=True)
class ServedModel:
    """A loaded model: chat format, sampler and default sampling parameters."""

    chat: TemplateChatFormat
    sampler: Sampler
    slots: int  # maximum choices sampled concurrently
    defaults: SamplingParams = field(default_factory=SamplingParams)  # used where a request sets none
    version: str | None = None  # such as agent:3; None: not a registered model
    model: Any = None  # a transformers or PEFT model; None if the sampler runs in another process
    folding: Folding | None = None  # of conversations that exceed its limit
    semaphore: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.defaults = dataclasses.replace(self.defaults, stop_ids=self.chat.stop_ids)
        self.semaphore = asyncio.Semaphore(self.slots)


def load_served_model(
    config: TrainingConfig, version: str | None = None, notify: Notify = lambda _: None
) -> ServedModel:
    """Load the model of a config; its sampling section gives the defaults of requests."""
    config = resolve_ids(config)
    slots = get_max_open_episodes(config)
    sampling_options = config.sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
    chat, sampler, model = make_sampler_and_model(config, slots, notify)
    folding = make_folding(config, sampler.max_length)
    return ServedModel(chat, sampler, slots, SamplingParams(**sampling_options), version, model, folding)


def make_serving_config(model: ResolvedModel, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Return the config to serve a model with: its training config's model and sampling sections and its folding of
    conversations, plus overrides."""
    sections = make_sections(model)
    assignments = [
        key_value(f"{section}.{key}", value)
        for section in ("model", "sampling")
        for key, value in sections.get(section, {}).items()
    ]
    if (context := sections.get("environment", {}).get("context")) is not None:
        assignments.append(key_value("environment.context", context))
    return load_config(None, [*assignments, *overrides])
