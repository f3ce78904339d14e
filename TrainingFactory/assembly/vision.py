"""Decide whether a run loads the vision part of its model: by `model.vision`, or if its data show images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from TrainingFactory.assembly.fleet import samples_elsewhere
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.data.examples import Examples
from TrainingFactory.models.names import TINY_VL_ID, resolve_model_name
from TrainingFactory.types import Message, Task


def with_vision(
    config: TrainingConfig,
    environment: Any = None,
    tasks: Iterable[Task] = (),
    examples: Examples | None = None,
) -> TrainingConfig:
    """Set `model.vision` to true if it is null and the environment (`shows_images`), a task or a dataset row has
    images."""
    if config.model.vision is None and (
        getattr(environment, "shows_images", False)
        or any(_shows_images(task.prompt) for task in tasks if not isinstance(task.prompt, str))
        or any(
            _shows_images(conversation.messages)
            for example in (examples.usable if examples is not None else ())
            for conversation in example.conversations
        )
    ):
        config = config.model_copy(update={"model": config.model.model_copy(update={"vision": True})})
    check_vision(config)
    return config


def _shows_images(messages: Iterable[Message]) -> bool:
    return any(message.images for message in messages)


def check_vision(config: TrainingConfig) -> None:
    """Raise ConfigError for options that do not support images."""
    model, problem = config.model, None
    if model.train_tower and model.quantization != "none":
        problem = ("model", "train_tower"), "needs unquantized weights: set model.quantization=none"
    if model.vision or resolve_model_name(model.name) == TINY_VL_ID:
        remedy = "and the model sees images, which only the native engine in the run's process samples: leave it out"
        if config.sampling.engine != "native":
            problem = ("sampling", "engine"), f"is {config.sampling.engine}, {remedy}"
        elif samples_elsewhere(config):
            problem = ("compute", "backend"), f"is {config.compute.backend}, {remedy}"
        elif (config.compute.learners or 1) > 1:
            text = f"is {config.compute.learners}, but a model that sees images is trained by one learner"
            problem = ("compute", "learners"), text
    if problem is not None:
        raise config.wrong([Problem(*problem)])
