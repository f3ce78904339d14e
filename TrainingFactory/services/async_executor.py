"""Concurrent tool calls and episodes."""

from TrainingFactory.assembly.rollout_engine import AsyncRolloutEngine
from TrainingFactory.tools import AsyncToolExecutor

__all__ = ["AsyncRolloutEngine", "AsyncToolExecutor"]
