"""The RL tools of the HelloAgents text on our trainers: `RLTrainingTool`, `rl`, and a `shim` for its imports."""

from TrainingFactory.integrations.hello_agents.results import Result
from TrainingFactory.integrations.hello_agents.tool import RLTrainingTool

__all__ = ["RLTrainingTool", "Result"]
