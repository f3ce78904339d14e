"""Named rules over turns: `rule(trajectory, turn)` is a number or a truth value for that turn.

A rule sees the trajectory as it was when the turn ended: later turns are not there, and `status` is `done` only if that
turn ended the episode well. So what it says about a turn cannot depend on what came after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from TrainingFactory.tools.schema import schema_problems, validator_of
from TrainingFactory.types import ToolCall, ToolResult, Trajectory, Turn

StepRule = Callable[[Trajectory, int], float | bool]
MIN_WORDS = 5  # different ones, of a reasoning that counts as one


def correct_tool(trajectory: Trajectory, turn: int) -> bool:
    """All calls of the turn went to the right tool and were answered well. Which one is right stands in the task's
    metadata `correct_tool`, a name or a list of names; else every tool that there is."""
    calls = _answered(trajectory.turns[turn])
    right = _right_tools(trajectory)
    return bool(calls) and all(call.name in right and _went_well(result) for call, result in calls)


def valid_arguments(trajectory: Trajectory, turn: int) -> bool:
    """All calls of the turn could be read, name a tool, and fit its schema."""
    specs = {spec.name: spec for spec in trajectory.tools}
    calls = _answered(trajectory.turns[turn])
    for call, result in calls:
        spec = specs.get(call.name)
        if spec is None or call.error or (result and result.error in ("schema", "malformed", "unknown")):
            return False
        if schema_problems(spec, validator_of(spec.parameters), call.arguments):
            return False
    return bool(calls)


def no_repeated_call(trajectory: Trajectory, turn: int) -> bool:
    """The turn calls something, and nothing that was called before with the same arguments."""
    seen = {_key(call) for one in trajectory.turns[:turn] for call in one.message.tool_calls}
    now = [_key(call) for call in trajectory.turns[turn].message.tool_calls]
    return bool(now) and len(set(now)) == len(now) and seen.isdisjoint(now)


def error_recovered(trajectory: Trajectory, turn: int) -> bool:
    """A tool that had failed at its last use is used well."""
    last: dict[str, bool] = {}
    for one in trajectory.turns[:turn]:
        last |= {call.name: _went_well(result) for call, result in _answered(one)}
    now = _answered(trajectory.turns[turn])
    return any(_went_well(result) and last.get(call.name) is False for call, result in now)


def clear_reasoning(trajectory: Trajectory, turn: int) -> bool:
    """The turn says why, as reasoning or as text beside its calls. A text that was there before counts as none."""
    text = _reasoning(trajectory.turns[turn])
    if len(set(re.findall(r"\w+", text.lower()))) < MIN_WORDS:
        return False
    before = {_plain(_reasoning(one)) for one in trajectory.turns[:turn]}
    return _plain(text) not in before


def efficient_path(trajectory: Trajectory, turn: int) -> float:
    """On the turn that ends the episode well: the shortest number of turns over the number that were taken. The
    shortest is the task's metadata `shortest`, else the number of turns of the environment's expert; where neither is
    known it is the share of turns that were no failure and no repetition."""
    if trajectory.status != "done" or turn != len(trajectory.turns) - 1:
        return 0.0
    shortest = trajectory.task.metadata.get("shortest")
    if shortest is None:
        wasted = sum(_wasted(trajectory, number) for number in range(turn + 1))
        return 1.0 - wasted / (turn + 1)
    if isinstance(shortest, bool) or not isinstance(shortest, int | float) or not shortest > 0:
        raise ValueError(f"the task's metadata shortest is {shortest!r}; it must be a number of turns")
    return min(1.0, shortest / (turn + 1))


PROCESS_RULES: dict[str, StepRule] = {
    "correct_tool": correct_tool,
    "valid_arguments": valid_arguments,
    "no_repeated_call": no_repeated_call,
    "error_recovered": error_recovered,
    "clear_reasoning": clear_reasoning,
    "efficient_path": efficient_path,
}


def register_rule(name: str, rule: StepRule) -> None:
    """Make a rule of one's own known by name to every `ProcessReward`."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name!r} cannot be the name of a rule; take letters, digits and _")
    if not callable(rule):
        raise ValueError(f"the rule {name} must be a function (trajectory, turn) -> number, not {rule!r:.60}")
    if PROCESS_RULES.get(name, rule) is not rule:
        raise ValueError(f"there is a rule {name} already; take another name")
    PROCESS_RULES[name] = rule


def _answered(turn: Turn) -> list[tuple[ToolCall, ToolResult | None]]:
    """Return the calls with their results; None where the environment did not report any."""
    calls = turn.message.tool_calls
    return list(zip_longest(calls, turn.tool_results[: len(calls)]))


def _went_well(result: ToolResult | None) -> bool:
    return result is not None and result.ok


def _right_tools(trajectory: Trajectory) -> set[str]:
    right: Any = trajectory.task.metadata.get("correct_tool")
    if right is None:
        return {spec.name for spec in trajectory.tools}
    names = [right] if isinstance(right, str) else right
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"the task's metadata correct_tool is {right!r:.60}; it must be a name or a list of names"
        )
    return set(names)


def _key(call: ToolCall) -> str:
    return f"{call.name} {json.dumps(call.arguments, sort_keys=True, default=str)}"


def _reasoning(turn: Turn) -> str:
    message = turn.message
    return message.reasoning or (message.content if message.tool_calls else "")


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def _wasted(trajectory: Trajectory, turn: int) -> bool:
    calls = _answered(trajectory.turns[turn])
    if not calls:
        return False
    return not all(_went_well(result) for _, result in calls) or not no_repeated_call(trajectory, turn)
