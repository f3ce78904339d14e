"""Environments: system prompt, tools, tasks and reward of an episode."""

from TrainingFactory.envs.base import ToolEnvironment
from TrainingFactory.envs.builtin.calculator import CalculatorEnvironment
from TrainingFactory.envs.builtin.search import SearchEnvironment
from TrainingFactory.envs.self_play import SelfPlayEnvironment

__all__ = ["CalculatorEnvironment", "SearchEnvironment", "SelfPlayEnvironment", "ToolEnvironment"]
