"""Environments: what the model sees, may do, and is asked to reach. Built-in ones are loaded when they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from TrainingFactory.envs.base import ToolEnvironment

if TYPE_CHECKING:
    from TrainingFactory.envs.builtin.calculator import CalculatorEnvironment
    from TrainingFactory.envs.builtin.search import SearchEnvironment

__all__ = ["CalculatorEnvironment", "SearchEnvironment", "ToolEnvironment"]


def __getattr__(name: str) -> Any:
    if name == "CalculatorEnvironment":
        from TrainingFactory.envs.builtin.calculator import CalculatorEnvironment as found
    elif name == "SearchEnvironment":
        from TrainingFactory.envs.builtin.search import SearchEnvironment as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
