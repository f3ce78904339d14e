"""The reward of a finished episode. What cannot be scored is said, never counted as zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from TrainingFactory.common.event_loop import other_loop
from TrainingFactory.common.user_code import failure, place_of
from TrainingFactory.protocols import ChatFormat, Environment, RewardFunction
from TrainingFactory.rewards.adapt import Unscored, called, checked
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.types import Reward, Task, ToolCall, ToolFailure, ToolResult, Trajectory


@dataclass(slots=True)
class Episode:
    """What a reward sees: the finished trajectory and the still open environment."""

    trajectory: Trajectory
    environment: Environment
    executor: AsyncToolExecutor  # the environment's own, or one over its tools
    chat: ChatFormat | None = None  # in which it was sampled
    heldout: bool = False  # sampled to measure the model, not to learn from

    @property
    def task(self) -> Task:
        return self.trajectory.task

    async def call(self, tool: str, **arguments: Any) -> ToolResult:
        """Call a tool of the environment. That a call failed is in its result; where the tool could not be asked,
        nothing is known: that raises ToolFailure, and a reward that lets it pass leaves the episode unscored."""
        return await call_tool(self.executor, tool, arguments)


async def call_tool(executor: AsyncToolExecutor, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
    """Call one tool; raise ToolFailure where it could not be asked."""
    [result] = await executor.batch_execute([ToolCall(tool, dict(arguments))])
    if result.error in ("timeout", "unavailable"):
        raise ToolFailure(result.content)
    return result


async def score(episode: Episode, function: RewardFunction | None) -> Reward:
    """By the given function, else by the environment's own `reward`; raises where that gives no reward."""
    function = function or getattr(episode.environment, "reward", None)
    if function is None:
        raise ValueError("the environment has no reward method, and no reward function was given")
    name = getattr(function, "__name__", type(function).__name__)
    try:
        value = await called(function, episode)
    except SystemExit as error:
        raise Unscored(f"the reward {name}{place_of(error)} tried to end the program") from error
    return checked(value, len(episode.trajectory.turns), str(name))


def scoring_failed(error: BaseException) -> str:
    """What an episode's `error` says then."""
    return f"scoring failed: {failure(error)}{other_loop(error)}"
