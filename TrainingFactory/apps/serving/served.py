"""One loaded model that can answer requests, and the config that it is loaded by."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from TrainingFactory.assembly.fleet import Say, at_once
from TrainingFactory.assembly.sampler import make_all
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.evaluation.evaluation import sections_of
from TrainingFactory.protocols import Sampler
from TrainingFactory.resolve.factories import by_file
from TrainingFactory.resolve.model_names import Named
from TrainingFactory.types import SamplingParams

if TYPE_CHECKING:
    from TrainingFactory.models import TemplateChatFormat


@dataclass(slots=True, eq=False, weakref_slot=True)
class Served:
    """What writes prompts, what samples, and what a client leaves out. `version`: of a registered model, as text."""

    chat: TemplateChatFormat
    sampler: Sampler
    slots: int  # choices that are sampled at a time
    defaults: SamplingParams = field(default_factory=SamplingParams)
    version: str | None = None
    model: Any = None  # a transformers or PEFT model, where the sampler has it in this process
    gate: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.defaults = dataclasses.replace(self.defaults, stop_ids=self.chat.stop_ids)
        self.gate = asyncio.Semaphore(self.slots)


def load_served(config: TrainingConfig, version: str | None = None, say: Say = lambda _: None) -> Served:
    """Load the model of a config; its sampling section holds what a client leaves out."""
    config = by_file(config)
    slots = at_once(config)
    sampling = config.sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
    chat, engine, model = make_all(config, slots, say)
    return Served(chat, engine, slots, SamplingParams(**sampling), version, model)


def served_config(found: Named, overrides: Sequence[str] = ()) -> TrainingConfig:
    """Return the config to serve a model with: what it was trained and sampled with, and the overrides over that."""
    sections = sections_of(found)
    given = [
        key_value(f"{section}.{key}", value)
        for section in ("model", "sampling")
        for key, value in sections.get(section, {}).items()
    ]
    return load_config(None, [*given, *overrides])
