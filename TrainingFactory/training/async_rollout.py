"""Groups that are sampled while the learner works, with a bound on how old they may be when they are trained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from TrainingFactory.training.source import SampledSource, StepGroups, problem_of, sampled_metrics
from TrainingFactory.types import Group


@dataclass(slots=True, eq=False)
class Slot:
    """What is sampled under one number: the group that is trained, behind those that taught nothing."""

    number: int
    attempt: int
    place: int
    groups: list[Group] = field(default_factory=list)


class AheadSource(SampledSource):
    """Samples up to `bound` steps ahead of the one that is learned from. A gate admits: the groups of a step begin when
    the version of the weights is at most `bound` steps before it. The sweep just before training guarantees: a group
    with a token older than that is given up, and sampled again as its next attempt. The groups of a step are those
    with the lowest numbers, which the gate keeps within the bound by itself; or with `by_arrival` the first that have
    ended. Groups begin in `take` alone: while the learner works, evaluates or saves, those under way go on, also with
    further tasks where one taught nothing, and no other begins."""

    def __init__(self, *given: Any, bound: int, by_arrival: bool, total: int, **options: Any) -> None:
        super().__init__(*given, **options)
        self._bound, self._by_arrival, self._total = bound, by_arrival, total
        ids = {task.id for task in self._tasks}
        self._repeated = len(ids) < len(self._tasks)
        self._slots: dict[int, Slot] = {}  # not trained yet, by number
        self._running: set[asyncio.Task[None]] = set()
        self._ended: list[Slot] = []  # in the order in which they did
        self._given_up: list[Group] = []  # since the last step
        self._last: float | None = None  # when the step before was taken

    async def take(self, step: int) -> StepGroups:
        started = time.perf_counter()
        self._admit(step)
        while len(chosen := self._ready(step)) < self._ledger.ahead[0]:
            done, self._running = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            if failed := [error for task in done if (error := task.exception()) is not None]:
                raise failed[0]  # in whatever group: it ends the run
        for slot in chosen:
            self._ended.remove(slot)
            del self._slots[slot.number]
        now = time.perf_counter()
        found = self._summed_up(step, chosen, now - started, now - (self._last or started))
        self._last, self._given_up, self._clock.seconds = now, [], 0.0
        return found

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()

    def _admit(self, version: int) -> None:
        """Begin the groups that the version of the weights allows; a run that goes on begins with those it had."""
        ledger = self._ledger
        while (step := version + len(ledger.ahead)) <= min(version + self._bound, self._total - 1):
            ledger.begin(step)
        for number in sorted(ledger.under_way.keys() - self._slots.keys()):
            if number // self._order.batch_size <= version + self._bound:  # which may have been larger before
                self._slots[number] = Slot(number, *ledger.under_way[number])
                self._begin(self._slots[number])

    def _begin(self, slot: Slot) -> None:
        self._running.add(asyncio.create_task(self._fill(slot), name=f"group {slot.number}"))

    async def _fill(self, slot: Slot) -> None:
        """Sample the group of a slot, and further ones where it teaches nothing and the algorithm refills."""
        while True:
            step = slot.number // self._order.batch_size
            slot.groups += await self._play(
                step, [slot.number], [slot.place], slot.attempt, [self._name(slot)]
            )
            latest = slot.groups[-1]
            full = latest.rows or len(slot.groups) > self._algorithm.refill
            if full or problem_of([latest], self._max_unscored):
                break
            if (place := self._ledger.one_more(slot.place)) is None:
                break
            slot.attempt, slot.place = slot.attempt + 1, place
        self._ended.append(slot)

    def _name(self, slot: Slot) -> str:
        """Name the group by its task; it gets seeds and recorded calls of its own."""
        name = self._tasks[self._order.at(slot.place)].id
        name += f"#{slot.number}" if self._repeated else ""
        return f"{name}@{slot.attempt}" if slot.attempt else name

    def _ready(self, version: int) -> list[Slot]:
        """Give up what is too old, and return those that have ended of the groups whose turn it is."""
        for slot in [each for each in self._ended if staleness(each.groups[-1], version) > self._bound]:
            self._ended.remove(slot)
            self._given_up.append(slot.groups.pop())
            slot.attempt += 1
            if not slot.groups:
                self._ledger.under_way[slot.number] = (slot.attempt, slot.place)
            self._begin(slot)
        size = self._ledger.ahead[0]
        if self._by_arrival:
            return self._ended[:size]
        turn = sorted(self._slots)[:size]
        return sorted((slot for slot in self._ended if slot.number in turn), key=lambda slot: slot.number)

    def _summed_up(self, step: int, chosen: Sequence[Slot], waited: float, passed: float) -> StepGroups:
        groups = [group for slot in chosen for group in slot.groups]
        recorded, given_up = _recorded(groups), _recorded(self._given_up)
        for group in groups:
            self._rename(group, step)
        ages = [staleness(slot.groups[-1], step) for slot in chosen]  # nothing is trained of those before
        waiting = [group for slot in self._ended for group in slot.groups]
        metrics = sampled_metrics(groups, passed, self._clock) | {
            "staleness/mean": fmean(ages),
            "staleness/max": max(ages),
            "groups/stale": len(self._given_up),
            "groups/in_flight": len(self._slots) - len(self._ended),
            "groups/waiting": len(self._ended),
            "seconds/waited": waited,
        }
        for name, some in (("waiting", waiting), ("stale", self._given_up)):
            if some:
                metrics[f"length/{name}"] = fmean(length for group in some for length in _lengths(group))
        problem = problem_of(groups, self._max_unscored)
        return StepGroups(step, groups, waited, metrics, problem, True, recorded, given_up)

    def _rename(self, group: Group, step: int) -> None:
        """Name a group after the step that trains it: the episodes of a step are found by that."""
        if group.number // self._order.batch_size != step:
            for trajectory in group.trajectories:
                _, _, name = trajectory.group.partition("/")
                trajectory.group = f"{step}/{name}#{group.number}"


def staleness(group: Group, version: int) -> int:
    """Return how many versions the oldest token of a group is behind."""
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    return max((version - min(turn.completion.token_versions) for turn in turns), default=0)


def _recorded(groups: Sequence[Group]) -> set[tuple[int | str, str]]:
    """Return step and name under which the calls of the groups stand in a recording."""
    parts = (trajectory.group.partition("/") for group in groups for trajectory in group.trajectories)
    return {(int(step), name) for step, _, name in parts}


def _lengths(group: Group) -> list[int]:
    return [sum(len(turn.completion.token_ids) for turn in each.turns) for each in group.trajectories]
