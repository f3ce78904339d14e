"""The environment that a config names."""

from __future__ import annotations

import inspect

from TrainingFactory import catalog
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import ChatFormat, EnvironmentFactory, RewardFunction
from TrainingFactory.services.build import rewards as build_rewards
from TrainingFactory.types import Message, Task
from TrainingFactory.user_code import chosen, is_file_name, told


def make_environment(config: TrainingConfig, given: bool = False) -> EnvironmentFactory:
    """Return the environment that is named; a plain conversation where there are tasks, or `given` tools or tasks."""
    name = config.environment.environment_id
    if name is not None:
        return environment_from_file(name) if is_file_name(name) else catalog.find("environment", name)
    if given or config.data.tasks is not None:
        return ToolEnvironment
    known = ", ".join(name for name, alias in catalog.names("environment").items() if alias is None)
    raise ValueError(
        f"no environment is named; give one of {known}, or a Python file such as weather.py; with tasks "
        "alone, data.tasks=FILE, there is a plain conversation"
    )


def environment_from_file(name: str) -> type[ToolEnvironment]:
    """Return the environment class in `weather.py`, or the one named in `weather.py:Weather`."""
    path, wanted, found = chosen("environment", name)
    found = [value for value in found if inspect.isclass(value) and issubclass(value, ToolEnvironment)]
    if not found:
        what = f"{wanted} in {path} is" if wanted else f"{path} defines"
        raise ValueError(f"{what} no environment: a class that inherits from ToolEnvironment")
    if len(found) > 1:
        names = ", ".join(f"{path}:{value.__name__}" for value in found)
        raise ValueError(f"{path} defines several environments; say which: {names}")
    return found[0]


async def check_tools(
    factory: EnvironmentFactory, task: Task, chat: ChatFormat, reward: RewardFunction | None = None
) -> None:
    """Check that the environment can be made, has what the reward calls, and that the template can show its tools."""
    try:
        environment = factory(task)
        try:
            specs = [tool.spec for tool in environment.tools]
            build_rewards.check_environment(reward, environment, task)
        finally:
            try:
                await environment.close()
            finally:
                if isinstance(environment, ToolEnvironment):
                    await environment.executor.close()
    except Exception as error:  # foreign code
        raise told(error) from error
    chat.render([Message("user", "?")], specs)
