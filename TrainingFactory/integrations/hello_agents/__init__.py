"""The RL tools of the HelloAgents textbook on our trainers: `RLTrainingTool`, `rl`, and a `shim` for its imports."""

from TrainingFactory.integrations.hello_agents.tool import Result, RLTrainingTool

__all__ = ["RLTrainingTool", "Result"]
