"""Which groups of a run are trained and which are under way: so that none is lost and none is trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from TrainingFactory.training.task_order import Order
from TrainingFactory.types import Group


class Ledger:
    """Hands out the places of the order, each once, and keeps which of them are used up. A place is a number of the
    order without its epochs: place p is number p % size of epoch p // size. A group keeps its number, and the place of
    its first task, until it is trained; a run that was broken off begins with those that were under way."""

    def __init__(
        self,
        order: Order,
        consumed: Sequence[Sequence[int]] = (),
        under_way: Sequence[Sequence[int]] = (),
        ahead: Sequence[int] = (),
    ) -> None:
        self._order = order
        self._consumed = {place for first, end in consumed[1:] for place in range(first, end)}
        self._end = consumed[0][1] if consumed else 0  # all before it are used up
        self.next = max(self._consumed, default=self._end - 1) + 1
        self.under_way = {number: (attempt, place) for number, attempt, place in under_way}
        self.ahead = list(ahead)  # how many groups the steps have that were begun and are not trained
        taken = {place for _, place in self.under_way.values()}
        self.next = max(self.next, max(taken, default=-1) + 1)
        # Others that were taken for a group and given back with it.
        self._free = [p for p in range(self._end, self.next) if p not in self._consumed and p not in taken]

    @property
    def left(self) -> int:
        """Return how many places the epoch of the next one has."""
        size = self._order.size
        epoch = self._peek() // size
        free = sum(place // size == epoch for place in self._free)
        return free + max(0, (epoch + 1) * size - self.next)

    def take(self, count: int) -> list[int]:
        """Return the next places: so many, or fewer where their epoch ends."""
        return [self._pop() for _ in range(min(count, self.left))]

    def one_more(self, place: int) -> int | None:
        """Return the next place if it is in the epoch of this one."""
        return self._pop() if self._peek() // self._order.size == place // self._order.size else None

    def begin(self, step: int) -> list[int]:
        """Take the places of a step, and return the numbers of its groups."""
        places = self.take(self._order.batch_size)
        first = step * self._order.batch_size
        self.under_way |= {first + n: (0, place) for n, place in enumerate(places)}
        self.ahead.append(len(places))
        return list(range(first, first + len(places)))

    def trained(self, groups: Iterable[Group]) -> None:
        """Enter the groups of a step."""
        for group in groups:
            self._consumed.add(group.place)
            self.under_way.pop(group.number, None)
        while self._end in self._consumed:
            self._consumed.remove(self._end)
            self._end += 1
        self.next = max(self.next, self._end)  # examples of a dataset are not taken from here
        self.ahead = self.ahead[1:]

    def state(self) -> dict[str, Any]:
        """Return what `of_state` takes: for a checkpoint."""
        ranges = [[0, self._end]]
        for place in sorted(self._consumed):
            if place == ranges[-1][1]:
                ranges[-1][1] += 1
            else:
                ranges.append([place, place + 1])
        found: dict[str, Any] = {"batch_size": self._order.batch_size, "consumed": ranges}
        if self.under_way:
            rows = sorted((number, *rest) for number, rest in self.under_way.items())
            found |= {"under_way": [list(row) for row in rows], "ahead": self.ahead}
        return found

    @classmethod
    def of_state(cls, order: Order, state: dict[str, Any]) -> Ledger:
        """Read a checkpoint's state; raise ValueError where the run had another batch size."""
        done = state["step"]
        if "batch_size" in state:
            size, consumed = state["batch_size"], state["consumed"]
        else:  # of an earlier version: `consumed` has numbers of groups, and all of them were trained in order
            [[_, numbers]] = state.get("consumed", [[0, done * order.batch_size]])
            size, consumed = numbers / done, [[0, state.get("taken", order.start(done))]]
        if size != order.batch_size:
            text = f"has taken {size * done:g} groups in {done} steps: its training.batch_size cannot change"
            raise ValueError(text)
        return cls(order, consumed, state.get("under_way", ()), state.get("ahead", ()))

    def _peek(self) -> int:
        return self._free[0] if self._free else self.next

    def _pop(self) -> int:
        if self._free:
            return self._free.pop(0)
        self.next += 1
        return self.next - 1


def wrong_in_ledger(rows: Iterable[dict[str, Any]], finished: bool = True) -> list[str]:
    """Check the rows of consumed.jsonl, of a run that is finished or not: return what was trained twice, in words, and
    what was lost."""
    steps, places, found = Counter[int](), Counter[int](), list[str]()
    numbers: dict[int, int] = {}
    for row in rows:
        steps[row["step"]] += 1
        for number, attempt, place in row["groups"]:
            places[place] += 1
            if numbers.setdefault(number, row["step"]) != row["step"]:
                found.append(
                    f"group {number} (attempt {attempt}) in the steps {numbers[number]} and {row['step']}"
                )
    for what, count in (("step", steps), ("place", places)):
        found += [f"{what} {each} {times} times" for each, times in sorted(count.items()) if times > 1]
    if list(steps) != list(range(1, len(steps) + 1)):
        found.append(f"the steps are {list(steps)}")
    if finished:
        lost = sorted(set(range(max(places, default=-1))) - set(places))
        found += [f"place {place} was never trained" for place in lost]
    return found
