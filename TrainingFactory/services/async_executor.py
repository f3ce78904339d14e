"""Tools and episodes that run at the same time: the face of `tools/executor.py` and `rollout/engine.py`."""

from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.tools import AsyncToolExecutor

__all__ = ["AsyncRolloutEngine", "AsyncToolExecutor"]
