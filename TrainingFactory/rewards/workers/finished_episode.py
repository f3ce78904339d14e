"""A trajectory as a reward wants it, long after its environment was closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from TrainingFactory.protocols import Environment
from TrainingFactory.types import Task, ToolFailure, ToolResult, Trajectory


@dataclass(slots=True)
class FinishedEpisode:
    trajectory: Trajectory

    @property
    def task(self) -> Task:
        return self.trajectory.task

    @property
    def environment(self) -> Environment:
        raise ToolFailure("the environment of this episode is closed; a reward that needs it cannot run here")

    async def call(self, tool: str, **arguments: Any) -> ToolResult:
        raise ToolFailure(f"the environment of this episode is closed, so {tool} cannot be called")
