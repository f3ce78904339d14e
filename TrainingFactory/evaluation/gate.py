"""Promotion gates: the `gate` section of a suite, and the checks of its guards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from TrainingFactory.common.options import Count, NotNegative, Text
from TrainingFactory.common.starters import find_docs
from TrainingFactory.config.problems import Problem
from TrainingFactory.config.section import Section
from TrainingFactory.evaluation.records import TaskOutcome

Metric = Literal["success", "reward", "tool_success", "turns", "tokens"]
LOWER_IS_BETTER = ("turns", "tokens")  # lower is better for these, higher for the others
GATE_KEYS = f"entry, not_worse, alpha, round and guards ({find_docs('REGISTRY.md')})"


class Guard(Section):
    """Limit for a metric of the challenger, relative to the champion or absolute."""

    metric: Metric
    """success, reward, tool_success (per call), turns or tokens (per episode). Lower is better for the last two."""
    entry: Text | None = None
    """Suite entry to measure on; null: the gate's entry."""
    worse_by: NotNegative | None = None
    """Maximum by which the challenger may be worse than the champion."""
    at_least: float | None = None
    """Minimum, independent of the champion."""
    at_most: float | None = None
    """Maximum, independent of the champion."""

    def format_limits(self) -> str:
        """Return the limits as text; empty if none is set."""
        limits = {
            "worse than the champion's by at most": self.worse_by,
            "at least": self.at_least,
            "at most": self.at_most,
        }
        return ", ".join(
            f"{limit_name} {value:g}" for limit_name, value in limits.items() if value is not None
        )


class Gate(Section):
    """Conditions that a challenger must meet against the champion."""

    entry: Text | None = None
    """Suite entry whose success rate decides; null: the first."""
    not_worse: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Non-inferiority margin: the challenger must not be worse by this much. null: it must be better."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Maximum probability of promoting a challenger that does not meet the condition (type I error)."""
    round: Count = 32
    """Tasks that the challenger plays between two looks of the sequential test."""
    guards: list[Guard] = Field(default_factory=list)
    """Limits for further metrics."""

    @property
    def min_difference(self) -> float:
        """Return the value that the mean difference in success must exceed."""
        return 0.0 - (self.not_worse or 0.0)

    def find_problems(self, entries: Sequence[str]) -> list[Problem]:
        """Return one text per invalid guard: it has no limit, or its entry is not among the suite's `entries`."""
        references = [(("gate", "entry"), self.entry)]
        references += [(("gate", "guards", i, "entry"), guard.entry) for i, guard in enumerate(self.guards)]
        message = f"is not an entry of the suite. Its entries: {', '.join(entries)}"
        problems = [Problem(key, message, name) for key, name in references if name not in (None, *entries)]
        message = "has no limit. Set worse_by, at_least or at_most"
        unlimited_guards = [i for i, guard in enumerate(self.guards) if not guard.format_limits()]
        return problems + [Problem(("gate", "guards", i), message) for i in unlimited_guards]

    def pick_guards(self, is_first: bool) -> list[Guard]:
        """Return the guards to check. For the first champion these are the guards with an absolute limit."""
        return [
            guard for guard in self.guards if not is_first or (guard.at_least, guard.at_most) != (None, None)
        ]

    def describe(self, main_entry: str, is_first: bool) -> list[str]:
        """Return the conditions of the gate as text; `main_entry` is the entry that decides."""
        guards = [
            f"{g.metric} on {g.entry or main_entry}: {g.format_limits()}" for g in self.pick_guards(is_first)
        ]
        if is_first:
            return guards or ["no condition for the first champion: no guard has at_least or at_most"]
        criterion = f"not worse by {self.not_worse:g}" if self.not_worse else "better"
        return [f"success on {main_entry}: {criterion}, with alpha {self.alpha:g} (sequential test)", *guards]


@dataclass(slots=True, frozen=True)
class GateCheck:
    """Result of one condition of the gate; `found` describes the measured value."""

    name: str
    holds: bool
    found: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}"


def compute_mean(outcomes: Sequence[TaskOutcome], metric: Metric) -> float | None:
    """Return the mean of a metric over all episodes; None if no episode has it."""
    episodes = [episode for task in outcomes for episode in task.episodes]
    if metric == "tool_success":
        num_calls = sum(episode.tool_calls for episode in episodes)
        return sum(episode.tool_successes for episode in episodes) / num_calls if num_calls else None
    values = [getattr(episode, metric) for episode in episodes if getattr(episode, metric) is not None]
    return sum(values) / len(values) if values else None


def check_guard(
    guard: Guard, main_entry: str, outcomes: Sequence[TaskOutcome], baseline: Sequence[TaskOutcome] | None
) -> GateCheck:
    """Check a guard on outcomes of the challenger and, if not None, the champion (`baseline`) on the same tasks."""
    mean = compute_mean(outcomes, guard.metric)
    baseline_mean = None if baseline is None else compute_mean(baseline, guard.metric)
    check_name = f"{guard.metric} on {guard.entry or main_entry}"
    if mean is None and baseline_mean is None and guard.at_least is None:
        return GateCheck(check_name, True, f"no values; limit: {guard.format_limits()}")
    if mean is None:
        return GateCheck(check_name, False, f"the challenger has no values; limit: {guard.format_limits()}")
    sign = 1 if guard.metric in LOWER_IS_BETTER else -1
    drop = 0.0 if baseline_mean is None else (mean - baseline_mean) * sign
    is_met = guard.worse_by is None or drop <= guard.worse_by + 1e-9  # tolerance for rounding errors
    is_met = is_met and (guard.at_least is None or mean >= guard.at_least)
    is_met = is_met and (guard.at_most is None or mean <= guard.at_most)
    champion_note = "" if baseline_mean is None else f", the champion's {baseline_mean:.4g}"
    return GateCheck(check_name, is_met, f"{mean:.4g}{champion_note}; limit: {guard.format_limits()}")
