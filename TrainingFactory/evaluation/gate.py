"""What must hold for a model to be promoted, in the section `gate` of a suite; and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from TrainingFactory.common.options import Count, NotNegative, Text
from TrainingFactory.config.problems import Problem
from TrainingFactory.config.section import Section
from TrainingFactory.evaluation.records import TaskOutcome

Metric = Literal["success", "reward", "tool_success", "turns", "tokens"]
FEWER = ("turns", "tokens")  # less of these is better, more of the others
KEYS = "entry, not_worse, alpha, round and guards (docs/REGISTRY.md)"


class Guard(Section):
    """Limits a figure of the challenger: by what the champion has, or as it is."""

    metric: Metric
    """success, reward, tool_success (of calls), turns or tokens (of an episode); less is better of the last two."""
    entry: Text | None = None
    """Of the suite; null: the gate's."""
    worse_by: NotNegative | None = None
    """How much worse than the champion's it may be."""
    at_least: float | None = None
    """The least it may be, whatever the champion has."""
    at_most: float | None = None
    """The most it may be, whatever the champion has."""

    def limits(self) -> str:
        found = [("worse than the champion's by at most", self.worse_by), ("at least", self.at_least)]
        return ", ".join(
            f"{word} {value:g}" for word, value in [*found, ("at most", self.at_most)] if value is not None
        )


class Gate(Section):
    """States what a challenger must prove against the champion."""

    entry: Text | None = None
    """Of the suite, whose success decides; null: the first."""
    not_worse: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Not to be worse by so much is enough; null: it must be better."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """The greatest chance of promoting one for which that is not so."""
    round: Count = 32
    """Tasks that the challenger plays before it is looked whether that decides."""
    guards: list[Guard] = Field(default_factory=list)
    """Figures that may not be worse than their limits."""

    @property
    def level(self) -> float:
        """Return what the mean difference must be over."""
        return 0.0 - (self.not_worse or 0.0)

    def problems(self, entries: Sequence[str]) -> list[Problem]:
        """Return what is wrong with a gate that is well formed, for the entries of its suite."""
        named = [(("gate", "entry"), self.entry)]
        named += [(("gate", "guards", n, "entry"), guard.entry) for n, guard in enumerate(self.guards)]
        text = f"is no entry of the suite; there are: {', '.join(entries)}"
        found = [Problem(key, text, name) for key, name in named if name is not None and name not in entries]
        for number, guard in enumerate(self.guards):
            if not guard.limits():
                found.append(
                    Problem(("gate", "guards", number), "has no limit: worse_by, at_least or at_most")
                )
        return found

    def asked(self, first: bool) -> list[Guard]:
        """Return the guards that are held; of the first champion those that need no other."""
        return [each for each in self.guards if not first or (each.at_least, each.at_most) != (None, None)]

    def stated(self, main: str, first: bool) -> list[str]:
        """Return the gate in words."""
        than = f"not worse by {self.not_worse:g}" if self.not_worse else "better"
        lines = [f"success on {main}: {than}, with an error of at most {self.alpha:g} (sequential test)"]
        guards = [f"{each.metric} on {each.entry or main}: {each.limits()}" for each in self.asked(first)]
        return (
            (guards or ["nothing of the first: no guard has at_least or at_most"])
            if first
            else lines + guards
        )


@dataclass(slots=True, frozen=True)
class Check:
    """One line of the gate, whether it holds, and what was found."""

    name: str
    holds: bool
    found: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}"


def measure(outcomes: Sequence[TaskOutcome], metric: Metric) -> float | None:
    """Return a figure over all episodes; None where there is nothing to count."""
    episodes = [each for task in outcomes for each in task.episodes]
    if metric == "tool_success":
        calls = sum(each.tool_calls for each in episodes)
        return sum(each.tool_successes for each in episodes) / calls if calls else None
    values = [getattr(each, metric) for each in episodes if getattr(each, metric) is not None]
    return sum(values) / len(values) if values else None


def check(
    guard: Guard, main: str, ours: Sequence[TaskOutcome], theirs: Sequence[TaskOutcome] | None
) -> Check:
    """Hold a guard against the challenger's outcomes and the champion's, of the same tasks; None: there is none."""
    mine, other = measure(ours, guard.metric), None if theirs is None else measure(theirs, guard.metric)
    name = f"{guard.metric} on {guard.entry or main}"
    if mine is None and other is None and guard.at_least is None:
        return Check(name, True, f"there is none; limit: {guard.limits()}")
    if mine is None:
        return Check(name, False, f"the challenger has none; limit: {guard.limits()}")
    worse = 0.0 if other is None else (mine - other) * (1 if guard.metric in FEWER else -1)
    holds = guard.worse_by is None or worse <= guard.worse_by + 1e-9  # of sums of floats
    holds = holds and (guard.at_least is None or mine >= guard.at_least)
    holds = holds and (guard.at_most is None or mine <= guard.at_most)
    than = "" if other is None else f", the champion's {other:.4g}"
    return Check(name, holds, f"{mine:.4g}{than}; limit: {guard.limits()}")
