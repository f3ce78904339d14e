"""Environments: what the model sees, may do, and is asked to reach."""

from TrainingFactory.envs.base import ToolEnvironment
from TrainingFactory.envs.builtin.calculator import CalculatorEnvironment
from TrainingFactory.envs.builtin.search import SearchEnvironment

__all__ = ["CalculatorEnvironment", "SearchEnvironment", "ToolEnvironment"]
