"""Scoring of finished episodes. An episode that cannot be scored has an error, never a reward of zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from TrainingFactory.common.event_loop import explain_foreign_loop
from TrainingFactory.common.user_code import describe_failure, locate_error
from TrainingFactory.protocols import ChatFormat, Environment, RewardFunction
from TrainingFactory.rewards.adapt import Unscored, call_function, validate_reward
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.types import Reward, Task, ToolCall, ToolFailure, ToolResult, Trajectory


@dataclass(slots=True)
class OpenEpisode:
    """Input of a reward function: the finished trajectory and the environment, which is still open."""

    trajectory: Trajectory
    environment: Environment
    executor: AsyncToolExecutor  # the environment's own, or one over its tools
    chat: ChatFormat | None = None  # the format in which it was sampled
    heldout: bool = False  # sampled for evaluation, not for training

    @property
    def task(self) -> Task:
        return self.trajectory.task

    async def call(self, tool: str, **arguments: Any) -> ToolResult:
        """Call a tool of the environment. The result says whether the call failed. If the tool timed out or is
        unavailable, raise ToolFailure; a reward that does not catch it leaves the episode unscored."""
        return await call_tool(self.executor, tool, arguments)


async def call_tool(executor: AsyncToolExecutor, tool_name: str, arguments: Mapping[str, Any]) -> ToolResult:
    """Call one tool; raise ToolFailure if it timed out or is unavailable."""
    [result] = await executor.batch_execute([ToolCall(tool_name, dict(arguments))])
    if result.error in ("timeout", "unavailable"):
        raise ToolFailure(result.content)
    return result


async def score(episode: OpenEpisode, reward_function: RewardFunction | None) -> Reward:
    """Return the reward by `reward_function` or by the environment's `reward` method. Raise if it is invalid."""
    reward_function = reward_function or getattr(episode.environment, "reward", None)
    if reward_function is None:
        raise ValueError("no reward function is configured, and the environment has no `reward` method")
    function_name = getattr(reward_function, "__name__", type(reward_function).__name__)
    try:
        reward = await call_function(reward_function, episode)
    except SystemExit as error:
        raise Unscored(f"the reward {function_name}{locate_error(error)} tried to end the program") from error
    return validate_reward(reward, episode.trajectory.turns, str(function_name))


def format_error(error: BaseException) -> str:
    """Return the `error` text of an episode for an exception that was raised while the episode was scored."""
    return f"scoring failed: {describe_failure(error)}{explain_foreign_loop(error)}"
