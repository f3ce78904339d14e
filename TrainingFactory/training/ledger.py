"""Bookkeeping of trained and running groups, so that no task is lost or trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from TrainingFactory.training.task_order import TaskOrder
from TrainingFactory.types import Group


class Ledger:
    """Assigns each position of the task order once, and tracks the trained positions. Positions count over all epochs:
    position p is index p % size of epoch p // size. A group keeps its number, and the position of its first task, until
    it is trained. A resumed run restarts unfinished groups."""

    def __init__(
        self,
        order: TaskOrder,
        consumed: Sequence[Sequence[int]] = (),
        unfinished: Sequence[Sequence[int]] = (),
        group_counts: Sequence[int] = (),
    ) -> None:
        self._order = order
        self._trained_positions = {position for start, end in consumed[1:] for position in range(start, end)}
        self._trained_end = consumed[0][1] if consumed else 0  # all positions before it are trained
        self.next_position = max(self._trained_positions, default=self._trained_end - 1) + 1
        self.unfinished_groups = {number: (attempt, position) for number, attempt, position in unfinished}
        self.group_counts = list(group_counts)  # number of groups of each started and untrained step
        running_positions = {position for _, position in self.unfinished_groups.values()}
        self.next_position = max(self.next_position, max(running_positions, default=-1) + 1)
        # Positions of refills that were discarded with their group.
        untrained_positions = set(range(self._trained_end, self.next_position)) - self._trained_positions
        self._free_positions = sorted(untrained_positions - running_positions)

    @property
    def num_left(self) -> int:
        """Return the number of positions of the task order that are left in the current epoch."""
        epoch_size = self._order.size
        epoch = self._peek_position() // epoch_size
        num_free = sum(position // epoch_size == epoch for position in self._free_positions)
        return num_free + max(0, (epoch + 1) * epoch_size - self.next_position)

    def take_positions(self, num_positions: int) -> list[int]:
        """Return the next `num_positions` positions of the task order, or fewer at the end of an epoch."""
        return [self._pop_position() for _ in range(min(num_positions, self.num_left))]

    def take_in_same_epoch(self, position: int) -> int | None:
        """Return the next position of the task order if it is in the same epoch as `position`; else None."""
        return (
            self._pop_position()
            if self._peek_position() // self._order.size == position // self._order.size
            else None
        )

    def start_step(self, step: int) -> list[int]:
        """Take the positions of a step's groups from the task order; return the numbers of the groups."""
        positions = self.take_positions(self._order.batch_size)
        first_number = step * self._order.batch_size
        self.unfinished_groups |= {first_number + i: (0, position) for i, position in enumerate(positions)}
        self.group_counts.append(len(positions))
        return list(range(first_number, first_number + len(positions)))

    def mark_trained(self, groups: Iterable[Group]) -> None:
        """Mark the groups of a step as trained."""
        for group in groups:
            self._trained_positions.add(group.position)
            self.unfinished_groups.pop(group.number, None)
        while self._trained_end in self._trained_positions:
            self._trained_positions.remove(self._trained_end)
            self._trained_end += 1
        self.next_position = max(self.next_position, self._trained_end)  # dataset examples are not taken
        self.group_counts = self.group_counts[1:]

    def make_state(self) -> dict[str, Any]:
        """Return the checkpoint state that `from_state` restores."""
        ranges = [[0, self._trained_end]]
        for position in sorted(self._trained_positions):
            if position == ranges[-1][1]:
                ranges[-1][1] += 1
            else:
                ranges.append([position, position + 1])
        state: dict[str, Any] = {"batch_size": self._order.batch_size, "consumed": ranges}
        if self.unfinished_groups:
            rows = sorted((number, *slot) for number, slot in self.unfinished_groups.items())
            state |= {"under_way": [list(row) for row in rows], "ahead": self.group_counts}
        return state

    @classmethod
    def from_state(cls, order: TaskOrder, state: dict[str, Any]) -> Ledger:
        """Restore a ledger from a checkpoint's state; raise ValueError if the run had another batch size."""
        step = state["step"]
        if "batch_size" in state:
            size, ranges = state["batch_size"], state["consumed"]
        else:  # written by an early version: `consumed` counts groups, all trained in order
            [[_, num_groups]] = state.get("consumed", [[0, step * order.batch_size]])
            size, ranges = num_groups / step, [[0, state.get("taken", order.get_start_position(step))]]
        if size != order.batch_size:
            text = f"has trained {size * step:g} groups in {step} steps: training.batch_size cannot change"
            raise ValueError(text)
        return cls(order, ranges, state.get("under_way", ()), state.get("ahead", ()))

    def _peek_position(self) -> int:
        return self._free_positions[0] if self._free_positions else self.next_position

    def _pop_position(self) -> int:
        if self._free_positions:
            return self._free_positions.pop(0)
        self.next_position += 1
        return self.next_position - 1


def find_ledger_errors(rows: Iterable[dict[str, Any]], is_finished: bool = True) -> list[str]:
    """Return the errors in the rows of consumed.jsonl: steps, groups and places that were trained twice and, if the run
    `is_finished`, places that were never trained."""
    step_counts, position_counts, problems = Counter[int](), Counter[int](), list[str]()
    group_steps: dict[int, int] = {}
    for row in rows:
        step_counts[row["step"]] += 1
        for number, attempt, position in row["groups"]:
            position_counts[position] += 1
            if group_steps.setdefault(number, row["step"]) != row["step"]:
                problems.append(
                    f"group {number} (attempt {attempt}) in the steps {group_steps[number]} and {row['step']}"
                )
    for label, counts in (("step", step_counts), ("place", position_counts)):
        problems += [f"{label} {value} {count} times" for value, count in sorted(counts.items()) if count > 1]
    if list(step_counts) != list(range(1, len(step_counts) + 1)):
        problems.append(f"the steps are {list(step_counts)}")
    if is_finished:
        untrained_positions = sorted(set(range(max(position_counts, default=-1))) - set(position_counts))
        problems += [f"place {position} was never trained" for position in untrained_positions]
    return problems
