"""Environments: what the model sees, may do, and is asked to reach."""

from TrainingFactory.envs.base import ToolEnvironment
from TrainingFactory.envs.calculator import CalculatorEnvironment
from TrainingFactory.envs.search import SearchEnvironment

__all__ = ["CalculatorEnvironment", "SearchEnvironment", "ToolEnvironment"]
