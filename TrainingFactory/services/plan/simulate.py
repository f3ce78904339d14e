"""Simulate training steps by events: episodes, samplers, tools, the learner, and what waits for what."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from TrainingFactory.services.plan.workload import Played, Workload

Resume = Callable[[], object]
Process = Generator[Callable[[Resume], object]]  # what it yields calls back when what it waits for is there


class Costs(NamedTuple):
    """Holds seconds: `decode` of a token in each of n rows whose contexts have so many tokens together, `prefill` of
    tokens behind known ones, `update` of groups; overlaps are the speeds of the two while one device does both."""

    decode: Callable[[int, float], float]
    prefill: Callable[[int, int], float]
    update: Callable[[Sequence[Played]], float]
    turn: float = 0.0  # in its sampler
    driver: float = 0.0  # of a turn in the one process that plays all episodes
    write: float = 0.0  # of weights, while sampling goes on
    load: float = 0.0  # of weights, while it stands still
    record: float = 0.0  # between two steps
    evaluation: float = 0.0  # likewise: of one, by the steps from one to the next
    checkpoint: float = 0.0  # likewise
    sampler_overlap: float = 0.5
    learner_overlap: float = 0.5


class Device:
    """A sampler: while prompts are computed no row goes on; else every row gets a token in the same time, which depends
    on how many there are. It may learn as well."""

    def __init__(self, clock: Simulation) -> None:
        self.clock, self.costs, self.halted, self.episodes = clock, clock.costs, False, 0
        self.cached = set[tuple[int, ...]]()  # prompts of groups, by attempts and versions
        self.lesson: list[Any] | None = None  # seconds left, resume
        self._rows = list[tuple[float, int, int, Resume]]()  # place where it ends, number, context, resume
        self._place, self._context = 0.0, 0  # tokens of a row since the beginning; all contexts together
        self._prompts, self._since, self._changes = 0.0, 0.0, 0  # seconds of prompts that are left

    def ask(self, seconds: float, tokens: int, context: int, resume: Resume) -> None:
        """Compute a prompt, then sample tokens behind a context that is so long in the mean."""
        self._prompts += seconds
        heapq.heappush(self._rows, (self._place + tokens, self._changes, context, resume))
        self._context += context

    def halt(self, halted: bool) -> None:
        """Stand still, or go on by new weights: what rows have behind them is then computed anew."""
        self.halted = halted
        self._prompts += self.costs.prefill(self._context, 0) if self._rows and not halted else 0.0

    def change(self, action: Callable[..., object], *given: Any) -> None:
        """Account for the time since the last change, make this one, and plan what is next."""
        passed, self._since, self._changes = self.clock.now - self._since, self.clock.now, self._changes + 1
        samples, speed, learning, step = self._state()
        if self.lesson is not None:
            self.lesson[0] -= passed * learning
        if samples:
            behind = max(0.0, passed * speed - self._prompts)
            self._prompts = max(0.0, self._prompts - passed * speed)
            self._place += behind / step if step else 0.0
        action(*given)
        samples, speed, learning, step = self._state()
        ends = [] if self.lesson is None else [(self.lesson[0] / learning, 0, self._end_lesson)]
        if samples:
            left = self._prompts + (self._rows[0][0] - self._place) * step
            ends.append((left / speed, 1, self._end_row))
        for seconds, _, end in sorted(ends)[:1]:
            self.clock.after(max(0.0, seconds), partial(self._due, self._changes, end))

    def _state(self) -> tuple[bool, float, float, float]:
        """Return whether it samples, how fast it samples and learns, and the seconds of a token."""
        samples = bool(self._rows) and not self.halted
        speeds = self.costs[-2:] if samples and self.lesson is not None else (1.0, 1.0)
        return samples, *speeds, self.costs.decode(len(self._rows), self._context) if samples else 0.0

    def _due(self, changes: int, end: Resume) -> None:
        if changes == self._changes:  # else what was planned holds no more
            self.change(end)

    def _end_lesson(self) -> None:
        assert self.lesson is not None
        self.clock.after(0.0, self.lesson[1])
        self.lesson = None

    def _end_row(self) -> None:
        self._place, _, context, resume = heapq.heappop(self._rows)
        self._context -= context
        self.clock.after(0.0, resume)


@dataclass
class Simulation:
    """The driver of a run: its gate, its loop and its episodes, as `services/training` has them. A group has the same
    episodes by its number and attempt, whatever the hardware."""

    workload: Workload
    costs: Costs
    batch_size: int
    group_size: int
    slots: int  # episodes at a time, in each sampler
    samplers: int = 1
    bound: int = 0
    shared: bool = False  # sampler and learner have one device
    by_arrival: bool = False  # a step takes the groups that ended first
    refill: int = 0  # further tasks for a group that taught nothing
    steps: int = 6
    seed: int = 0

    def run(self, skipped: int = 1) -> tuple[float, float]:
        """Return seconds and sampled tokens of a step, in the mean; those before the stream is full do not count."""
        self.now, self._events, self._version, self._driven = 0.0, list[tuple[float, int, Resume]](), 0, 0.0
        self._devices = [Device(self) for _ in range(self.samplers)]
        self._learner = self._devices[0] if self.shared else Device(self)
        self._room, self._outside, self._pushed = self.slots * self.samplers, deque[Resume](), 0
        # by number: episodes, how many are left, attempts, version of the first token; what is ready to be trained
        self._played, self._left, self._tries = dict[int, Played](), dict[int, int](), dict[int, int]()
        self._since, self._ended = dict[int, int](), list[int]()
        self._times, self._loop = list[float](), None  # ends of steps; what waits for groups
        self._start(self._steps())
        while self._events:
            self.now, _, resume = heapq.heappop(self._events)
            resume()
        counted, first = self.steps - skipped, skipped * self.batch_size
        seconds = (self._times[-1] - self._times[skipped - 1]) / counted
        return seconds, sum(self._played[n].sampled for n in range(first, len(self._played))) / counted

    def after(self, seconds: float, resume: Resume) -> None:
        self._pushed += 1
        heapq.heappush(self._events, (self.now + seconds, self._pushed, resume))

    def _start(self, process: Process) -> None:
        if (wait := next(process, None)) is not None:
            wait(partial(self._start, process))

    def _steps(self) -> Process:
        size, learner = self.batch_size, self._learner
        for step in range(self.steps):
            while len(self._played) < min(step + self.bound + 1, self.steps) * size:
                self._begin(len(self._played))
            while len(chosen := self._ready(step)) < size:
                yield partial(setattr, self, "_loop")
            self._ended = [number for number in self._ended if number not in chosen]
            groups = (self._played[number] for number in sorted(chosen))
            lesson = self.costs.update([group for group in groups if group.taught])
            yield lambda resume, of=lesson: learner.change(setattr, learner, "lesson", [of, resume])
            yield partial(self.after, self.costs.write)
            for sampler in self._devices:
                sampler.change(sampler.halt, True)
            yield partial(self.after, self.costs.load)
            self._version += 1
            for sampler in self._devices:
                sampler.change(sampler.halt, False)
            yield partial(self.after, self.costs.record + self.costs.evaluation + self.costs.checkpoint)
            self._times.append(self.now)

    def _ready(self, step: int) -> list[int]:
        """Return what has ended of the groups whose turn it is. What is too old begins again; if nothing is sampled
        ahead, what taught nothing too, when all have ended."""
        turn = [number for number in self._ended if self.by_arrival or number // self.batch_size == step]
        again = [number for number in turn if step - self._since[number] > self.bound]
        again += [] if self.bound or len(turn) < self.batch_size else filter(self._refills, turn)
        for number in again:
            self._ended.remove(number)
            self._begin(number)
        return [number for number in turn if number not in again][: self.batch_size]

    def _refills(self, number: int) -> bool:
        return not self._played[number].taught and self._tries[number] <= self.refill

    def _begin(self, number: int) -> None:
        tries = self._tries.get(number, 0)
        rng = np.random.default_rng([self.seed, number, tries] if tries else [self.seed, number])
        self._played[number], self._tries[number] = self.workload(rng, self.group_size), tries + 1
        self._left[number] = self.group_size
        self._since.pop(number, None)
        for member in range(self.group_size):
            self._start(self._episode(number, member))

    def _enter(self, resume: Resume) -> None:
        self._outside.append(resume)
        self._admit(0)

    def _admit(self, left: int) -> None:
        self._room += left
        if self._room and self._outside:
            self._room -= 1
            self.after(0.0, self._outside.popleft())

    def _episode(self, number: int, member: int) -> Process:
        yield self._enter
        sampler = min(self._devices, key=lambda each: each.episodes)
        sampler.episodes += 1
        context, seen, group, costs = 0, -1, self._played[number], self.costs
        for turn in group.episodes[member]:
            self._driven = max(self._driven, self.now) + costs.driver  # one turn after the other
            yield partial(self.after, self._driven - self.now)
            key = (number, self._tries[number], self._version)
            prompt = group.episodes[0][0].new if key in sampler.cached else 0
            known, seen = context if seen == self._version else prompt, self._version
            self._since.setdefault(number, seen)
            sampler.cached.add(key)
            context += turn.new
            seconds, mean = costs.prefill(max(0, context - known), known), context + turn.sampled // 2
            yield partial(sampler.change, sampler.ask, costs.turn + seconds, turn.sampled, mean)
            context += turn.sampled
            yield partial(self.after, turn.tool)
        yield partial(self.after, group.rewards[member])
        sampler.episodes -= 1
        self._admit(1)
        self._left[number] -= 1
        if not self._left[number] and self.bound and self._refills(number):
            self._begin(number)
        elif not self._left[number]:
            self._ended.append(number)
            if self._loop is not None:
                self.after(0.0, self._loop)
                self._loop = None
