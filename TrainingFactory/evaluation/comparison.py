"""Two models or more on the same tasks with the same random numbers: which tasks flipped, and what that proves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.evaluation import statistics
from TrainingFactory.evaluation.records import (
    EvaluationRecord,
    Say,
    TaskOutcome,
    all_records,
    read_records,
)
from TrainingFactory.evaluation.requests import RecordedEvaluation, ask, ask_model
from TrainingFactory.evaluation.suites import check_overrides, load_suite, suite_evaluations
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.runs.folder import is_run
from TrainingFactory.types import Trajectory

LEAST_FLIPS = 6  # with fewer no exact test is below 0.05, even if all went one way


class Found(NamedTuple):
    file: Path
    record: EvaluationRecord


@dataclass(slots=True)
class Side:
    """One of those that are compared: a record for each entry of the suite, or for the only set of tasks; None until
    it is evaluated, by what stands at the same place of `wanted`."""

    name: str
    found: list[Found | None] = field(default_factory=list)
    wanted: list[RecordedEvaluation | None] = field(default_factory=list)

    def add(self, evaluation: RecordedEvaluation, again: bool = False) -> None:
        """Take the record of an earlier evaluation like this one, or want it to be run, be it again."""
        earlier = None if again else _earlier(evaluation)
        if earlier is not None:
            evaluation.discard()
        self.found.append(earlier)
        self.wanted.append(None if earlier else evaluation)

    def play(self) -> None:
        """Run what has no record yet."""
        for evaluation in self.wanted:
            if evaluation is not None:
                evaluation.run()
        self.take()

    def take(self) -> None:
        """Take the records of what has been run since."""
        for place, evaluation in enumerate(self.wanted):
            if evaluation is not None and evaluation.record is not None:
                self.found[place] = Found(evaluation.asked.records, evaluation.record)

    @property
    def records(self) -> list[EvaluationRecord]:
        return [each.record for each in self.found if each is not None]


class Flip(NamedTuple):
    """A task that one side does better than the other; `members` are the episodes of each that tell it best."""

    place: int  # of the entry
    task: str
    shares: tuple[float, float]
    members: tuple[int, int]


@dataclass(slots=True)
class Comparison:
    """The second side against the first: positive differences are in favour of the second."""

    first: Side
    second: Side
    difference: statistics.Estimate
    p: float  # exact, of tasks that became better and worse
    tasks: int
    better: list[Flip]
    worse: list[Flip]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        found = self.difference
        return {
            "first": self.first.name,
            "second": self.second.name,
            "records": [[record.id for record in side.records] for side in (self.first, self.second)],
            "tasks": self.tasks,
            "difference": found.value,
            "difference_low": found.low,
            "difference_high": found.high,
            "p": self.p,
            "better": [flip.task for flip in self.better],
            "worse": [flip.task for flip in self.worse],
            "notes": self.notes,
        }

    def episodes(self, flips: Iterable[Flip]) -> list[tuple[Flip, list[Trajectory | None]]]:
        """Return the flips with the episode of each side; None where it was not kept."""
        flips = list(flips)
        sides = [_episodes(self.first, flips, 0), _episodes(self.second, flips, 1)]
        return [(flip, [side.get((flip.place, flip.task)) for side in sides]) for flip in flips]


def sides(
    names: Sequence[str],
    overrides: Sequence[str] = (),
    env: str | None = None,
    suite: str | None = None,
    say: Say = lambda _: None,
    runs: str | Path = "runs",
    again: bool = False,
) -> tuple[list[Side], list[float]]:
    """Return what is compared, checked, with the records there are, and the weights of the entries. Without a suite the
    tasks are those of the environment, or of the first run that is named, of those that have one if any has."""
    recorded = {name: found for name in names if (found := _recorded(name, runs, say)) is not None}
    if recorded and suite is not None:
        raise ValueError(f"{next(iter(recorded))} is one evaluation, and a suite has several: name its model")
    made, weights, lead = [Side(name) for name in names], [1.0], None
    models = [name for name in names if name not in recorded]
    if suite is not None:
        check_overrides(overrides)
        found, folder = load_suite(suite)
        weights = [entry.weight for entry in found.entries]
        for side in made:
            for each in suite_evaluations(found, ask_model(side.name, overrides, runs), folder, say):
                side.add(each, again)
        return made, weights
    if models:
        makers = {name: maker for name in models if (maker := find_model(name, runs).maker) is not None}
        played = [name for name, maker in makers.items() if _plays(maker.config)]
        lead = ask([*played, *makers, *models][0], overrides, env, say, runs)
    for side in made:
        if side.name in recorded:
            side.found.append(recorded[side.name])
            side.wanted.append(None)
        else:
            assert lead is not None
            asked = ask_model(side.name, overrides, runs).under(lead.config)
            side.add(RecordedEvaluation(asked, say=say), again)
    return made, weights


def _plays(config: TrainingConfig) -> bool:
    return config.environment.environment_id is not None or KINDS[config.training.algorithm].samples


def compare(first: Side, second: Side, weights: Sequence[float] = (1.0,)) -> Comparison:
    """Pair what both were asked, task by task."""
    strata, notes, flips, count = [], [], list[Flip](), 0
    ours, theirs = first.records, second.records
    for place, (weight, one, other) in enumerate(zip(weights, ours, theirs, strict=True)):
        pairs = paired(one, other)
        if not pairs:
            raise ValueError(
                f"{first.name} and {second.name} have no scored task in common: {one.id} is of "
                f"{len(one.outcomes)} tasks of {one.conditions.environment}, {other.id} of {len(other.outcomes)} of "
                f"{other.conditions.environment}; evaluate both with the same --env and --tasks"
            )
        notes += _unlike(one, other, len(pairs))
        changes = [share(b) - share(a) for a, b in pairs]
        strata.append((weight, changes))
        count += len(pairs)
        flips += [_flip(place, a, b) for (a, b), change in zip(pairs, changes, strict=True) if change]
    better = [flip for flip in flips if flip.shares[1] > flip.shares[0]]
    worse = [flip for flip in flips if flip.shares[1] < flip.shares[0]]
    if len(flips) < LEAST_FLIPS:
        notes.append(
            f"only {len(flips)} of {count} tasks flipped, which proves nothing either way; take more tasks"
        )
    p = statistics.exact_test(len(better), len(worse))
    return Comparison(first, second, statistics.bootstrap(strata), p, count, better, worse, notes)


def _recorded(name: str, runs: str | Path, say: Say) -> Found | None:
    """Return a recorded evaluation by its id, or the last of a file; None for what names no record."""
    if name.endswith(".jsonl"):
        records = read_records(Path(name).expanduser(), say)
        if not records:
            raise ValueError(f"{name} has no record of an evaluation that can be read")
        return Found(Path(name).expanduser(), records[-1])
    if not name.startswith("eval-") or is_run(Path(runs) / name):
        return None
    known = {record.id: Found(file, record) for file, record in all_records(runs, say)}
    if name not in known:
        near = did_you_mean(nearest(name, known))
        raise ValueError(f"there is no recorded evaluation {name} in {runs}{near}")
    return known[name]


def _earlier(evaluation: RecordedEvaluation) -> Found | None:
    """Return the last record of the same model under the same conditions."""
    file, model = evaluation.asked.records, evaluation.model
    for record in reversed(read_records(file)):
        known = record.model
        same = known.digest == model.digest
        if known.digest is None:  # of a run on its way
            same = model.run_id is not None and (known.run_id, known.step) == (model.run_id, model.step)
        if same and known.options == model.options and record.conditions == evaluation.conditions:
            return Found(file, record)
    return None


def paired(one: EvaluationRecord, other: EvaluationRecord) -> list[tuple[TaskOutcome, TaskOutcome]]:
    theirs = {(each.task, each.digest): each for each in other.outcomes if each.scored}
    ours = [each for each in one.outcomes if each.scored and (each.task, each.digest) in theirs]
    return [(each, theirs[each.task, each.digest]) for each in ours]


def _unlike(one: EvaluationRecord, other: EvaluationRecord, paired: int) -> list[str]:
    """Return what makes the comparison less than that of two models alone."""
    notes = []
    if differences := one.conditions.differences(other.conditions):
        told = [text for text in differences if not text.startswith(("tasks ", "count "))]
        if any(text.startswith("rest ") for text in told):
            told = [text for text in told if not text.startswith("rest ")]
            told.append("environment, tools or reward differ")
        notes += [f"{one.id} and {other.id} were not asked alike: {', '.join(told)}"] if told else []
    if left := max(len(one.outcomes), len(other.outcomes)) - paired:
        notes.append(f"{left} tasks are left out: not asked of both, or not scored in both")
    return notes


def share(outcome: TaskOutcome) -> float:
    return sum(outcome.scored) / len(outcome.scored)


def _flip(place: int, one: TaskOutcome, other: TaskOutcome) -> Flip:
    up = share(other) > share(one)

    def telling(outcome: TaskOutcome, success: bool) -> int:
        return next((each.member for each in outcome.episodes if each.success is success), 0)

    return Flip(place, one.task, (share(one), share(other)), (telling(one, not up), telling(other, up)))


def _episodes(side: Side, flips: Sequence[Flip], which: int) -> dict[tuple[int, str], Trajectory]:
    """Return the telling episodes of a side, from the files that its records name."""
    found: dict[tuple[int, str], Trajectory] = {}
    for place, known in enumerate(side.found):
        wanted = {(flip.task, flip.members[which]) for flip in flips if flip.place == place}
        file = None if known is None or known.record.episodes_file is None else known.record.episodes_file
        path = None if known is None or file is None else known.file.parent / file
        if wanted and path is not None and path.is_file():
            for episode in load_trajectories(path):
                if (episode.task.id, episode.member) in wanted:
                    found[place, episode.task.id] = episode
    return found
