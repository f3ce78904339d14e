"""Promotion by proof: a version gets an alias only if it holds the gate of a suite against the version that has it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from TrainingFactory.config.loading import key_value
from TrainingFactory.evaluation.comparison import Comparison, Side, compare
from TrainingFactory.evaluation.gate import KEYS, Check, Gate, Guard, check
from TrainingFactory.evaluation.records import EvaluationRecord, Say, TaskOutcome
from TrainingFactory.evaluation.requests import RecordedEvaluation, ask_model
from TrainingFactory.evaluation.suites import check_overrides, load_suite, suite_evaluations
from TrainingFactory.promotion import sequential
from TrainingFactory.registry.catalogue import Catalogue
from TrainingFactory.registry.rows import check_name
from TrainingFactory.types import Trajectory

Play = Callable[[str, RecordedEvaluation], None]  # whose episodes these are


@dataclass(slots=True)
class Decision:
    """What was decided about a challenger, and why; it is in the registry."""

    promoted: bool
    text: str
    checks: list[Check]
    sides: list[Side] = field(default_factory=list)
    comparison: Comparison | None = None


@dataclass(slots=True)
class Duel:
    """The champion's share of successes in each task, in an order that the seed has fixed, and what is to be proved."""

    order: list[str]
    shares: list[float]
    level: float
    alpha: float

    @classmethod
    def of(cls, champion: EvaluationRecord, gate: Gate) -> Duel:
        scored = champion.scored
        order = list(scored)
        random.Random(f"promotion {champion.conditions.seed}").shuffle(order)
        return cls(order, [_share(scored[task]) for task in order], gate.level, gate.alpha)

    def differences(self, ours: Mapping[str, Sequence[bool]]) -> list[float]:
        """Return the challenger's shares less the champion's, in order. What could not be scored counts as lost: it
        must be no way round hard tasks."""
        pairs = zip(self.order, self.shares, strict=True)
        return [_share(ours[task]) - share for task, share in pairs if task in ours]

    def is_proved(self, differences: Sequence[float]) -> bool:
        return sequential.proved(differences, self.level, self.alpha) is not None

    def can_be_proved(self, differences: Sequence[float]) -> bool:
        """Tell whether it would be proved if the challenger did all the tasks that are left."""
        return self.is_proved([*differences, *(1 - share for share in self.shares[len(differences) :])])

    def decided(self, played: Sequence[Trajectory]) -> bool:
        """Tell whether no further task could change the decision."""
        ours: dict[str, list[bool]] = {each.task.id: [] for each in played}
        for each in played:
            ours[each.task.id] += [] if each.reward is None else [each.reward.outcome > 0]
        found = self.differences(ours)
        return self.is_proved(found) or not self.can_be_proved(found)


class Promotion:
    """Checks everything when it is made, and plays nothing: `stated` is the gate in words. The champion is played in
    full, or its earlier record taken; the challenger in rounds, until the sequential test has decided."""

    def __init__(
        self, registry: Catalogue, name: str, alias: str, suite: str, first: bool = False,
        overrides: Sequence[str] = (), runs: str | Path = "runs", say: Say = lambda _: None,
    ) -> None:  # fmt: skip
        check_name(alias, "alias")
        check_overrides(overrides)
        self.registry, self.alias = registry, alias
        self.version = registry.get(name)
        there = {
            each: version for version in registry.versions(self.version.model) for each in version.aliases
        }
        self.champion = there.get(alias)
        self.target = f"{self.version.model}@{alias}"
        if self.champion is not None and (first or self.champion.number == self.version.number):
            raise ValueError(f"{self.target} is {self.champion} already{'; leave --first out' * first}")
        if self.champion is None and not first:
            raise ValueError(
                f"there is no {self.target} to compare {self.version} with; --first promotes it if the guards hold "
                "that need no champion (at_least, at_most)"
            )
        found, folder = load_suite(suite)
        if found.gate is None:
            raise ValueError(f"suite {suite} has no gate; add a section `gate:` with {KEYS}")
        self.suite, self.gate = found, found.gate
        titles = [each.title for each in found.entries]
        self.main = self.gate.entry or titles[0]
        wanted = [self.main, *(guard.entry or self.main for guard in self.gate.guards)]
        self.entries = list(dict.fromkeys(wanted))  # what the gate does not name is not played
        asked = found.model_copy(
            update={"entries": [found.entries[titles.index(title)] for title in self.entries]}
        )
        given = [*overrides, key_value("logging.output_dir", str(runs))]
        names = [str(each) for each in (self.champion, self.version) if each is not None]
        self.sides = [Side(name) for name in names]
        for side in self.sides:
            model = ask_model(side.name, given, runs, registry.path)
            for each in suite_evaluations(asked, model, folder, say):
                side.add(each)
        self.stated = self.gate.stated(self.main, first)

    def run(self, play: Play | None = None) -> Decision:
        """Play what is needed, decide, and write the decision into the registry."""
        play = play or (lambda _, evaluation: evaluation.run() and None)
        try:
            checks = [] if self.champion is None else [self._test(play)]
            if all(each.holds for each in checks):
                for place in range(len(self.entries)):
                    for side in self.sides:
                        self._play(side, place, play)
                checks += [self._guard(guard) for guard in self.gate.asked(self.champion is None)]
        finally:
            for evaluation in (each for side in self.sides for each in side.wanted):
                if evaluation is not None and evaluation.record is None:
                    evaluation.discard()
        return self._decide(checks)

    def _test(self, play: Play) -> Check:
        """Let the challenger play in rounds until it is decided whether its success is over the level."""
        champion, challenger = self.sides
        self._play(champion, 0, play)
        duel = Duel.of(champion.records[0], self.gate)
        if not duel.can_be_proved([]):
            done = f"{sum(duel.shares):g} of {len(duel.shares)} tasks"
            why = f"{champion.name} does {done}, which leaves too little to prove it"
            return Check(self.stated[0], False, f"{why}; take more or harder tasks, or not_worse")
        if (evaluation := challenger.wanted[0]) is not None:
            tasks, size = {task.id: task for task in evaluation.tasks}, self.gate.round
            order = [tasks[task] for task in duel.order]
            evaluation.rounds = [order[at : at + size] for at in range(0, len(order), size)]
            evaluation.enough = duel.decided
        self._play(challenger, 0, play)
        found = duel.differences({name: each.scored for name, each in _by_task(challenger, 0).items()})
        text = f"difference {sum(found) / len(found):+.3f} after {len(found)} of {len(duel.order)} tasks, proved to be "
        text += f"over {sequential.lower_bound(found, duel.alpha):+.3f}; needed: over {duel.level:+.3f}"
        return Check(self.stated[0], duel.is_proved(found), text)

    def _guard(self, guard: Guard) -> Check:
        place = self.entries.index(guard.entry or self.main)
        outcomes = [_by_task(side, place) for side in self.sides]
        both = [task for task in outcomes[-1] if task in outcomes[0]]
        *theirs, ours = [[each[task] for task in both] for each in outcomes]
        return check(guard, self.main, ours, theirs[0] if theirs else None)

    def _play(self, side: Side, place: int, play: Play) -> None:
        evaluation = side.wanted[place]
        if side.found[place] is None and evaluation is not None:
            play(side.name, evaluation)
            side.take()
            if side.found[place] is None:
                raise ValueError(
                    f"{side.name} on {self.entries[place]} was broken off, or no episode could be scored: nothing is "
                    "decided"
                )

    def _decide(self, checks: list[Check]) -> Decision:
        failed = [str(each) for each in checks if not each.holds]
        played = [
            place for place in range(len(self.entries)) if all(side.found[place] for side in self.sides)
        ]
        sides = [Side(side.name, [side.found[place] for place in played]) for side in self.sides]
        comparison = compare(sides[0], sides[1], [1.0] * len(played)) if played and sides[1:] else None
        evidence = {
            "suite": self.suite.name,
            "gate": self.gate.model_dump(exclude_none=True),
            "checks": [asdict(each) for each in checks],
            "records": {side.name: [record.id for record in side.records] for side in sides},
            "comparison": None if comparison is None else comparison.as_json(),
        }
        was = None if self.champion is None else self.champion.number
        if not failed:
            try:
                self.registry.set_alias(str(self.version), self.alias, "promote", evidence, was)
            except ValueError as error:  # another was promoted meanwhile
                failed = [str(error)]
        text = "; ".join(failed) or "the gate holds"
        if failed:
            self.registry.decide(str(self.version), self.alias, "refuse", evidence | {"reason": text})
        return Decision(not failed, text, checks, sides, comparison)


def _by_task(side: Side, place: int) -> dict[str, TaskOutcome]:
    found = side.found[place]
    assert found is not None
    return {each.task: each for each in found.record.outcomes}


def _share(won: Sequence[bool]) -> float:
    return sum(won) / len(won) if won else 0.0
