"""The environment that a config names."""

from __future__ import annotations

from TrainingFactory import catalog
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import ChatFormat, EnvironmentFactory, RewardFunction
from TrainingFactory.services.build import rewards as build_rewards
from TrainingFactory.services.build.user_code import environment_from_file
from TrainingFactory.types import Message, Task
from TrainingFactory.user_code import is_file_name, told


def make_environment(config: TrainingConfig, with_tools: bool = False) -> EnvironmentFactory:
    """`with_tools`: tools are handed to the run, which then needs no environment of its own."""
    name = config.environment.environment_id
    if name is not None:
        return environment_from_file(name) if is_file_name(name) else catalog.find("environment", name)
    if with_tools:
        return ToolEnvironment  # a plain conversation
    known = ", ".join(name for name, alias in catalog.names("environment").items() if alias is None)
    raise ValueError(f"no environment is named; give one of {known}, or a Python file such as weather.py")


async def check_tools(
    factory: EnvironmentFactory, task: Task, chat: ChatFormat, reward: RewardFunction | None = None
) -> None:
    """Check that the environment can be made, has what the reward calls, and the model's template can show its tools:
    once, with a clear text, instead of one failed episode after another."""
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
