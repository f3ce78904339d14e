"""The environment of a config."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.agent_api.agent_program import AgentProgram
from TrainingFactory.assembly import rewards as reward_assembly
from TrainingFactory.common import catalog
from TrainingFactory.common.starters import find_docs
from TrainingFactory.common.user_code import as_value_error, is_file_name, load_objects, split_name
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.envs.base import ForeignEnvironment
from TrainingFactory.envs.self_play import SelfPlayEnvironment, is_self_play
from TrainingFactory.protocols import ChatFormat, EnvironmentFactory, RewardFunction, Tool, ToolSource
from TrainingFactory.resolve.factories import Notify, add_searched_places
from TrainingFactory.resolve.siblings import ENVIRONMENT_FACTORY
from TrainingFactory.tools.adapt import as_tool
from TrainingFactory.types import Message, Task

# Scoring methods of RL-Factory's environments; here `reward` takes their place.
RL_FACTORY_METHODS = (
    "_compute_score_with_rules", "_compute_score_with_reward_rollout_wg", "compute_score", "get_prompt_for_reward",
    "get_step_reward", "verify_tool",
)  # fmt: skip


def make_environment(
    config: TrainingConfig, has_user_tools: bool = False, notify: Notify = lambda _: None
) -> EnvironmentFactory:
    """Return the factory of the config's environment, or a plain conversation if there are only tasks or user tools.
    `notify` gets one line per resolved id."""
    name = config.environment.environment_id
    if config.environment.command is not None:
        return make_program(config, config.environment.command)
    if name is not None:
        return as_environment_factory(find_environment(name, notify), config.environment.options)
    if has_user_tools or config.data.tasks is not None:
        return as_environment_factory(ToolEnvironment, config.environment.options)
    known_names = ", ".join(name for name, alias in catalog.names("environment").items() if alias is None)
    raise ValueError(
        f"no environment is named; set environment.environment_id to one of {known_names}, or to a Python file such as "
        "weather.py; or set data.tasks=FILE for a plain conversation"
    )


def make_program(config: TrainingConfig, command: str) -> AgentProgram:
    """Return the user's agent program; raise for options that it would ignore."""
    section = config.environment
    conflicting_options = {
        "tools": config.tools,
        "deterministic": config.sampling.deterministic,
        "environment_id": section.environment_id,
        "system_prompt": section.system_prompt,
    }
    if conflicts := ", ".join(name for name, value in conflicting_options.items() if value):
        raise ValueError(f"environment.command cannot be combined with {conflicts}: the program has its own")
    return AgentProgram(command, section.options)


def find_environment(environment_id: str, notify: Notify = lambda _: None) -> Any:
    """Return an environment by name: a Python file, a scenario of an EnvironmentFactory, or a catalog entry."""
    if is_file_name(environment_id) and not is_foreign(environment_id):
        return load_environment_file(environment_id)
    if (scenario := ENVIRONMENT_FACTORY.find_object(environment_id)) is not None:
        notify(f"environment.environment_id {environment_id} is a scenario of {ENVIRONMENT_FACTORY.package}")
        return make_scenario_environment(scenario)
    with add_searched_places("environments"):
        environment = catalog.find("environment", environment_id)
    if alias := catalog.names("environment").get(environment_id):
        notify(f"environment.environment_id {environment_id} is {alias}, a built-in environment")
    return environment


def is_foreign(environment_id: str) -> bool:
    """Return whether the name has the prefix of environments in other processes, such as `process:node game.mjs`."""
    prefix, colon, _ = environment_id.partition(":")
    return bool(colon) and f"{prefix}:" in catalog.names("environment")


def check_environment_name(name: str) -> None:
    """Raise the same error as `find_environment` if the name of an environment is unknown. Known names are not
    imported."""
    if is_foreign(name):
        return
    known_names, path = catalog.names("environment").keys(), Path(split_name(name)[0]).expanduser()
    if not (path.is_file() if is_file_name(name) else known_names & {name, f"{name.partition('/')[0]}/"}):
        find_environment(name)


def make_scenario_environment(scenario: Any) -> Any:
    """Return the environment of an EnvironmentFactory's scenario: its `environment`, or a conversation with its
    `tools`."""
    name = str(scenario.scenario_id)
    environment = getattr(scenario, "environment", None)
    if environment is not None:
        return find_environment(str(environment)) if isinstance(environment, str | Path) else environment
    scenario_tools = [as_tool(tool) for tool in getattr(scenario, "tools", ())]
    rows_by_split = {"train": getattr(scenario, "tasks", None), "heldout": getattr(scenario, "heldout", None)}
    if rows_by_split["train"] is None or any(isinstance(tool, ToolSource) for tool in scenario_tools):
        raise ValueError(
            f"scenario {name!r} is a {type(scenario).__name__} with neither an `environment` (a class, a name, a file) "
            f"nor `tasks` (rows or a file) with `tools` that need no server; see {find_docs('FACTORIES.md')}"
        )

    class Scenario(ToolEnvironment):
        system_prompt = getattr(scenario, "system_prompt", "")

        def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = ()) -> None:
            super().__init__(task, [*scenario_tools, *tools])

        @classmethod
        def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
            if rows_by_split.get(split) is None:
                raise ValueError(
                    f"scenario {name!r} has no `{split}`; name a file of tasks instead: data.heldout=FILE"
                )
            return load_tasks(rows_by_split[split], count=count)

    return Scenario


def as_environment_factory(environment: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Return the factory of environments; wrap an environment of another framework, instantiated with `options`."""
    if inspect.isclass(environment) and issubclass(environment, ForeignEnvironment):
        try:
            environment = environment.from_options(options or {})
        except Exception as error:  # foreign code
            raise as_value_error(error) from error
    elif options:
        raise ValueError(
            f"environment.options ({', '.join(options)}) are only for android, charts, containers and screen, for "
            "environments in other processes, such as gymnasium:NAME, and for those written for RL-Factory. Remove them"
        )
    if isinstance(environment, ForeignEnvironment):
        return environment.as_environment()
    _reject_uncalled_methods(environment)
    return environment


def _reject_uncalled_methods(environment: Any) -> None:
    """Raise if a `ToolEnvironment` has RL-Factory's scoring methods and no reward of its own, because nothing would
    call these methods."""
    if not (inspect.isclass(environment) and issubclass(environment, ToolEnvironment)):
        return
    methods = [name for name in RL_FACTORY_METHODS if hasattr(environment, name)]
    if methods and environment.reward is ToolEnvironment.reward:
        raise ValueError(
            f"{environment.__name__} has {', '.join(methods)} as in RL-Factory, and nothing here would call it: "
            "inherit from TrainingFactory.integrations.rl_factory.Env, which does, or score the episode in "
            "`reward(self, episode)`, step by step by a Reward with `steps`"
        )


def load_environment_file(
    file_name: str,
) -> type[ToolEnvironment] | type[ForeignEnvironment] | type[SelfPlayEnvironment]:
    """Return the environment class in `weather.py`, or the one named in `weather.py:Weather`."""
    path, attribute, objects = load_objects("environment", file_name)
    base_classes = (ToolEnvironment, ForeignEnvironment, SelfPlayEnvironment)
    classes = [member for member in objects if inspect.isclass(member) and issubclass(member, base_classes)]
    if not classes:
        subject = f"{attribute} in {path} is" if attribute else f"{path} defines"
        raise ValueError(f"{subject} no environment: a class that inherits from ToolEnvironment")
    if len(classes) > 1:
        choices = ", ".join(f"{path}:{member.__name__}" for member in classes)
        raise ValueError(f"{path} defines several environments; name one of them: {choices}")
    return classes[0]


def check_self_play(config: TrainingConfig, environment: Any, reward: RewardFunction | None) -> None:
    """Raise for options that do not apply to a game of two roles."""
    if not is_self_play(environment):
        return
    name = environment.__name__
    if not reward_assembly.uses_only_environment_reward(reward):
        raise ValueError(f"{name} scores its roles itself: set reward.type=environment, and pass no reward")
    option_values = {
        "training.branching": config.training.branching,
        "environment.user": config.environment.user,
        "environment.system_prompt": config.environment.system_prompt,
        "tools": config.tools,
    }
    if unusable_options := ", ".join(key for key, option in option_values.items() if option):
        raise ValueError(f"{unusable_options} does not apply to self-play ({name}): remove it")
    if config.sampling.deterministic and config.sampling.slots < 2:
        raise ValueError(f"self-play ({name}) with sampling.deterministic needs sampling.slots of at least 2")


async def check_tools(
    factory: EnvironmentFactory, task: Task, chat: ChatFormat, reward: RewardFunction | None = None
) -> None:
    """Raise if the environment cannot be instantiated for `task`, lacks a tool that the reward calls, or has tools that
    the chat template cannot render."""
    try:
        environment = factory(task)
        try:
            specs = [tool.spec for tool in environment.tools]
            reward_assembly.check_environment(reward, environment, task)
        finally:
            try:
                await environment.close()
            finally:
                if isinstance(environment, ToolEnvironment):
                    await environment.executor.close()
    except Exception as error:  # foreign code
        raise as_value_error(error) from error
    chat.render([Message("user", "?")], specs)
