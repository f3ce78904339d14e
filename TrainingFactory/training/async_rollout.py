"""Asynchronous rollouts: groups are sampled while the learner trains, with a limit on their policy lag."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from TrainingFactory.training.filters import find_dropped_problem
from TrainingFactory.training.source import SampledSource, StepGroups, compute_metrics, find_unscored_problem
from TrainingFactory.types import Group


@dataclass(slots=True, eq=False)
class GroupSlot:
    """The groups sampled under one group number. The last one is trained; the earlier ones gave no training rows."""

    number: int
    attempt: int
    position: int
    groups: list[Group] = field(default_factory=list)


class AsyncSource(SampledSource):
    """Asynchronous source of groups, which samples up to `max_staleness` steps ahead of training.
    Gate: the groups of a step start once the weights' version is at most `max_staleness` steps before it.
    Sweep: before training, a group with a token older than that is discarded and sampled again as its next attempt.
    By default, a step trains the groups with the lowest numbers, which the gate alone keeps within the limit. With
    `by_arrival`, it trains the groups that finished first. Groups start only in `take`. While the learner trains,
    evaluates or saves, running groups continue, including their refills, but no further group starts."""

    def __init__(self, *args: Any, max_staleness: int, by_arrival: bool, steps: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_staleness, self._trains_by_arrival, self._num_steps = max_staleness, by_arrival, steps
        task_ids = {task.id for task in self._tasks}
        self._has_duplicate_ids = len(task_ids) < len(self._tasks)  # task ids are not unique
        self._slots: dict[int, GroupSlot] = {}  # not trained yet, by number
        self._running: set[asyncio.Task[None]] = set()
        self._finished_slots: list[GroupSlot] = []  # in order of completion
        self._stale_groups: list[Group] = []  # discarded since the last step
        self._taken_at: float | None = None  # time at which the previous step was taken

    async def take(self, step: int) -> StepGroups:
        start_time = time.perf_counter()
        self._start_admissible_groups(step)
        while len(slots := self._take_finished_groups(step)) < self._ledger.group_counts[0]:
            done_tasks, self._running = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            if errors := [error for task in done_tasks if (error := task.exception()) is not None]:
                raise errors[0]  # an error in any group ends the run
        for slot in slots:
            self._finished_slots.remove(slot)
            del self._slots[slot.number]
        now = time.perf_counter()
        batch = self._make_step_groups(step, slots, now - start_time, now - (self._taken_at or start_time))
        self._taken_at, self._stale_groups, self._reward_clock.seconds = now, [], 0.0
        return batch

    async def close(self) -> None:
        """Cancel all running groups."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()

    def _start_admissible_groups(self, version: int) -> None:
        """Start the groups of all steps up to `version + max_staleness`; a resumed run restarts its unfinished ones."""
        ledger, last_step = self._ledger, version + self._max_staleness
        while (step := version + len(ledger.group_counts)) <= min(last_step, self._num_steps - 1):
            ledger.start_step(step)
        for number in sorted(ledger.unfinished_groups.keys() - self._slots.keys()):
            if number // self._order.batch_size <= last_step:  # a resume may lower max_staleness
                self._slots[number] = GroupSlot(number, *ledger.unfinished_groups[number])
                self._start_group(self._slots[number])

    def _start_group(self, slot: GroupSlot) -> None:
        self._running.add(asyncio.create_task(self._sample_group(slot), name=f"group {slot.number}"))

    async def _sample_group(self, slot: GroupSlot) -> None:
        """Sample the slot's group; if it gives no training rows and the algorithm refills, sample further tasks."""
        while True:
            step = slot.number // self._order.batch_size
            name = self._make_group_name(slot)
            slot.groups += await self._play_groups(step, [slot.number], [slot.position], slot.attempt, [name])
            latest_group = slot.groups[-1]
            is_complete = latest_group.rows or len(slot.groups) > self._algorithm.refill
            if is_complete or find_unscored_problem([latest_group], self._max_unscored):
                break
            if (position := self._ledger.take_in_same_epoch(slot.position)) is None:
                break
            slot.attempt, slot.position = slot.attempt + 1, position
        self._finished_slots.append(slot)

    def _make_group_name(self, slot: GroupSlot) -> str:
        """Return a unique name of the group, from which its seeds and the keys of its recorded calls are derived."""
        name = self._tasks[self._order.get_task_index(slot.position)].id
        name += f"#{slot.number}" if self._has_duplicate_ids else ""
        return f"{name}@{slot.attempt}" if slot.attempt else name

    def _take_finished_groups(self, version: int) -> list[GroupSlot]:
        """Discard and restart groups staler than `max_staleness`; return the finished groups that the step trains."""
        lags = [(slot, compute_staleness(slot.groups[-1], version)) for slot in self._finished_slots]
        for slot in [slot for slot, lag in lags if lag > self._max_staleness]:
            self._finished_slots.remove(slot)
            self._stale_groups.append(slot.groups.pop())
            slot.attempt += 1
            if not slot.groups:
                self._ledger.unfinished_groups[slot.number] = (slot.attempt, slot.position)
            self._start_group(slot)
        num_groups = self._ledger.group_counts[0]
        if self._trains_by_arrival:
            return self._finished_slots[:num_groups]
        slots = {slot.number: slot for slot in self._finished_slots}
        return [slots[number] for number in sorted(self._slots)[:num_groups] if number in slots]

    def _make_step_groups(
        self, step: int, slots: Sequence[GroupSlot], wait_seconds: float, elapsed_seconds: float
    ) -> StepGroups:
        groups = [group for slot in slots for group in slot.groups]
        recorded_keys, discarded_keys = list_call_keys(groups), list_call_keys(self._stale_groups)
        for group in groups:
            self._rename_for_step(group, step)
        slot_lags = [
            compute_staleness(slot.groups[-1], step) for slot in slots
        ]  # only a slot's last group is trained
        waiting_groups = [group for slot in self._finished_slots for group in slot.groups]
        metrics = compute_metrics(groups, elapsed_seconds, self._reward_clock) | {
            "staleness/mean": fmean(slot_lags),
            "staleness/max": max(slot_lags),
            "groups/stale": len(self._stale_groups),
            "groups/in_flight": len(self._slots) - len(self._finished_slots),
            "groups/waiting": len(self._finished_slots),
            "seconds/waited": wait_seconds,
        }
        metrics |= self._count_dropped_forks()
        for name, untrained_groups in (("waiting", waiting_groups), ("stale", self._stale_groups)):
            if untrained_groups:
                metrics[f"length/{name}"] = fmean(
                    length for group in untrained_groups for length in count_sampled_tokens(group)
                )
        problem = find_unscored_problem(groups, self._max_unscored) or find_dropped_problem(groups)
        return StepGroups(step, groups, wait_seconds, metrics, problem, True, recorded_keys, discarded_keys)

    def _rename_for_step(self, group: Group, step: int) -> None:
        """Name a group after the step that trains it, because a step's episodes are looked up by that name."""
        if group.number // self._order.batch_size != step:
            for trajectory in group.trajectories:
                _, _, name = trajectory.group.partition("/")
                trajectory.group = f"{step}/{name}#{group.number}"


def compute_staleness(group: Group, version: int) -> int:
    """Return the policy lag of a group's oldest token, in weight versions."""
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    return max((version - min(turn.completion.token_versions) for turn in turns), default=0)


def list_call_keys(groups: Sequence[Group]) -> set[tuple[int | str, str]]:
    """Return the (step, name) keys of the groups' tool calls in a recording."""
    name_parts = (trajectory.group.partition("/") for group in groups for trajectory in group.trajectories)
    return {(int(step), name) for step, _, name in name_parts}


def count_sampled_tokens(group: Group) -> list[int]:
    return [sum(len(turn.completion.token_ids) for turn in episode.turns) for episode in group.trajectories]
