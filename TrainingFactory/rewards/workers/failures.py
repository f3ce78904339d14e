"""Whose fault it is where a worker gives no reward, and how that is told from one process to another."""

from __future__ import annotations

from typing import Any

from TrainingFactory.rewards.adapt import BrokeOff, Unscored
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.types import ToolFailure
from TrainingFactory.user_code import failure

# What a reward raises at a row that it does not understand; anything else may be the worker's.
ROWS_OWN = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError, ToolFailure)


class WorkerFailure(Exception):
    """A process could not score anything: it cannot be started, or what its reward needs is out of reach."""


def is_rows_own(error: Exception) -> bool:
    return isinstance(error, ROWS_OWN) and not isinstance(error, BrokeOff)


def failure_to_dict(error: Exception) -> dict[str, Any]:
    if isinstance(error, JudgeFailure):
        return {"error": str(error), "judge": error.kind}
    return {"error": failure(error), "own": is_rows_own(error)}


def failure_from_dict(told: dict[str, Any]) -> Exception:
    if "judge" in told:
        return JudgeFailure(told["error"], told["judge"])
    return (Unscored if told["own"] else WorkerFailure)(told["error"])
