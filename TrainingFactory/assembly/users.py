"""The simulated user from `environment.user`, checked before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from TrainingFactory.assembly.folding import is_template_file
from TrainingFactory.assembly.local_judge import (
    REQUESTS_PER_ENGINE,
    JudgeOptions,
    LocalJudge,
    RequestOptions,
    find_judge_model,
)
from TrainingFactory.common.endpoints.anthropic import DEFAULT_MAX_TOKENS
from TrainingFactory.common.endpoints.names import EndpointSettings, find_endpoint, is_endpoint
from TrainingFactory.common.options import make_from
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.config.schema import UserSection
from TrainingFactory.envs.users import SimulatedUser, UserBrief
from TrainingFactory.envs.users.user import DEFAULT_TEMPLATE
from TrainingFactory.tools.endpoints.client import EndpointClient

USER_KEY = ("environment", "user")
CLIENT_OPTIONS = ("concurrency", "rate", "retries", "pause", "cache", "replay")  # also for a model of the run


class UserClient(EndpointClient):
    MODEL_ROLE = "the user model"


def make_user(config: TrainingConfig, is_replaying: bool = False) -> SimulatedUser | None:
    """Return the config's simulated user without starting an engine; None if it has none. Raise ConfigError if it
    cannot work. A run that `is_replaying` reads replies from its recording without an API key."""
    section = config.environment.user
    if section is None:
        return None
    if config.environment.command is not None:
        text = (
            "does not apply to environment.command: your program talks to its own users. Remove one of them"
        )
        raise config.wrong([Problem(USER_KEY, text)])
    if config.training.branching is not None:
        text = "cannot be combined with training.branching: a forked episode would need a copy of its user. Remove one"
        raise config.wrong([Problem(USER_KEY, text)])
    brief = _make_brief(config, section)
    try:
        client = _make_client(config, section, is_replaying)
    except ValueError as error:
        key = "options" if section.options else "model"
        raise config.wrong([Problem((*USER_KEY, key), str(error))]) from error
    # A reply waits for other episodes' requests, so only the episode's own limit bounds it.
    return SimulatedUser(client, brief, config.environment.episode_timeout)


def _make_brief(config: TrainingConfig, section: UserSection) -> UserBrief:
    template = DEFAULT_TEMPLATE if section.template is None else section.template
    if section.template is not None and is_template_file(section.template):
        try:
            template = Path(section.template).expanduser().read_text(encoding="utf-8").strip()
        except OSError as error:
            message = f"cannot be read ({Path(section.template).name}: {error.strerror})"
            raise config.wrong([Problem((*USER_KEY, "template"), message, section.template)]) from error
    if "{stop}" not in template and section.stop not in template:
        message = "has no {stop}: without it the user model does not know how to end the conversation"
        raise config.wrong([Problem((*USER_KEY, "template"), message)])
    return UserBrief(
        section.persona,
        section.goal,
        template,
        section.first,
        section.stop,
        section.max_turns,
        section.sees_tools,
    )


def _make_client(config: TrainingConfig, section: UserSection, is_replaying: bool) -> UserClient:
    if is_endpoint(section.model):
        settings = find_endpoint(section.model, **section.options)
        if not is_replaying:
            settings.check_key()
        return _build_client(settings.make_endpoint(), settings)
    options: dict[str, Any] = {"model": section.model, **section.options}
    limits = {name: options.pop(name) for name in CLIENT_OPTIONS if name in options}
    sampling_options = {"max_tokens": DEFAULT_MAX_TOKENS} | (options.pop("options", None) or {})
    judge_options: JudgeOptions = make_from(JudgeOptions, options, "the model of environment.user")
    if judge_options.replicas > 1 and config.compute.backend != "ray":
        raise ValueError(
            f"replicas={judge_options.replicas} needs compute.backend=ray: without Ray it has one process"
        )
    params = make_from(RequestOptions, sampling_options, "options of the model of environment.user")
    limits = {"concurrency": REQUESTS_PER_ENGINE * judge_options.replicas} | limits
    settings = make_from(EndpointSettings, {"model": section.model} | limits, "the model of environment.user")
    model_path = find_judge_model(judge_options.model, config)
    return _build_client(LocalJudge(judge_options, model_path, params, config, "simulated user"), settings)


def _build_client(model: Any, settings: EndpointSettings) -> UserClient:
    return UserClient(
        model=model, concurrency=settings.concurrency, rate=settings.rate, retries=settings.retries,
        pause=settings.pause, cache=settings.cache, budget=settings.budget, replay=settings.replay,
    )  # fmt: skip
