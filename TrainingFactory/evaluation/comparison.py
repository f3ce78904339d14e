"""Paired comparison of models on the same tasks with the same seeds: flipped tasks, difference and significance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.common.options import did_you_mean, nearest
from TrainingFactory.common.texts import pluralize
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.evaluation import statistics
from TrainingFactory.evaluation.records import (
    EvaluationRecord,
    Notify,
    TaskOutcome,
    read_all_records,
    read_records,
)
from TrainingFactory.evaluation.requests import RecordedEvaluation, ask, make_model_request
from TrainingFactory.evaluation.suites import check_overrides, load_suite, make_suite_evaluations
from TrainingFactory.resolve.model_names import find_model
from TrainingFactory.runs.folder import is_run
from TrainingFactory.types import Trajectory

MIN_FLIPS = 6  # with fewer, the exact test cannot reach p < 0.05 even if all tasks flipped the same way


class StoredRecord(NamedTuple):
    """An evaluation record and the file that contains it."""

    file: Path
    record: EvaluationRecord


@dataclass(slots=True)
class ComparedModel:
    """One model of a comparison. `stored_records` has an evaluation record for each entry of the suite; without a
    suite, one record. A record is None if the evaluation at the same index of `evaluations` has not run yet."""

    name: str
    stored_records: list[StoredRecord | None] = field(default_factory=list)
    evaluations: list[RecordedEvaluation | None] = field(default_factory=list)

    def add_evaluation(self, evaluation: RecordedEvaluation, must_rerun: bool = False) -> None:
        """Reuse an earlier record under the same conditions unless `must_rerun` is set, or schedule the evaluation."""
        earlier_record = None if must_rerun else _find_earlier_record(evaluation)
        if earlier_record is not None:
            evaluation.discard()
        self.stored_records.append(earlier_record)
        self.evaluations.append(None if earlier_record else evaluation)

    def play(self) -> None:
        """Run the scheduled evaluations and add their records."""
        for evaluation in self.evaluations:
            if evaluation is not None:
                evaluation.run()
        self.collect_records()

    def collect_records(self) -> None:
        """Add the records of scheduled evaluations that have run."""
        for index, evaluation in enumerate(self.evaluations):
            if evaluation is not None and evaluation.record is not None:
                self.stored_records[index] = StoredRecord(evaluation.request.records_file, evaluation.record)

    @property
    def records(self) -> list[EvaluationRecord]:
        return [stored_record.record for stored_record in self.stored_records if stored_record is not None]


class Flip(NamedTuple):
    """Task with different success rates on both sides, and the two group members that show the difference."""

    entry_index: int  # index of the suite entry
    task_id: str
    success_rates: tuple[float, float]
    members: tuple[int, int]


@dataclass(slots=True)
class Comparison:
    """Comparison of two models. A positive difference means that the second model is better."""

    first: ComparedModel
    second: ComparedModel
    difference: statistics.Estimate
    p_value: float  # of McNemar's exact test
    num_tasks: int
    wins: list[Flip]
    losses: list[Flip]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "first": self.first.name,
            "second": self.second.name,
            "records": [[record.id for record in side.records] for side in (self.first, self.second)],
            "tasks": self.num_tasks,
            "difference": self.difference.value,
            "difference_low": self.difference.low,
            "difference_high": self.difference.high,
            "p": self.p_value,
            "better": [flip.task_id for flip in self.wins],
            "worse": [flip.task_id for flip in self.losses],
            "notes": self.notes,
        }

    def load_episodes(self, flips: Iterable[Flip]) -> list[tuple[Flip, list[Trajectory | None]]]:
        """Return each flip with the episodes of both sides; an episode is None if it was not saved."""
        flips = list(flips)
        episodes_by_side = [_load_episodes(self.first, flips, 0), _load_episodes(self.second, flips, 1)]
        return [
            (flip, [episodes.get((flip.entry_index, flip.task_id)) for episodes in episodes_by_side])
            for flip in flips
        ]


def sides(
    names: Sequence[str],
    overrides: Sequence[str] = (),
    env: str | None = None,
    suite: str | None = None,
    notify: Notify = lambda _: None,
    runs: str | Path = "runs",
    must_rerun: bool = False,
) -> tuple[list[ComparedModel], list[float]]:
    """Return the sides of a comparison with their existing records, and the weights of the suite's entries. Nothing is
    run. Without a suite, the tasks are those of `env`, or of the first run in `names`, preferably one that sampled
    episodes."""
    records_by_name = {n: record for n in names if (record := _get_record(n, runs, notify)) is not None}
    if records_by_name and suite is not None:
        name = next(iter(records_by_name))
        raise ValueError(f"cannot compare the single evaluation {name} on a suite. Name its model instead")
    sides = [ComparedModel(name) for name in names]
    reference_request = None
    model_names = [name for name in names if name not in records_by_name]
    if suite is not None:
        check_overrides(overrides)
        loaded_suite, folder = load_suite(suite)
        for side in sides:
            for evaluation in make_suite_evaluations(
                loaded_suite, make_model_request(side.name, overrides, runs), folder, notify
            ):
                side.add_evaluation(evaluation, must_rerun)
        return sides, [entry.weight for entry in loaded_suite.entries]
    if model_names:
        runs_by_name = {name: run for name in model_names if (run := find_model(name, runs).run) is not None}
        sampling_names = [name for name, run in runs_by_name.items() if _is_sampling(run.config)]
        reference_request = ask(
            [*sampling_names, *runs_by_name, *model_names][0], overrides, env, notify, runs
        )
    for side in sides:
        if side.name in records_by_name:
            side.stored_records.append(records_by_name[side.name])
            side.evaluations.append(None)
        else:
            assert reference_request is not None
            request = make_model_request(side.name, overrides, runs).with_conditions(reference_request.config)
            side.add_evaluation(RecordedEvaluation(request, notify=notify), must_rerun)
    return sides, [1.0]


def _is_sampling(config: TrainingConfig) -> bool:
    return config.environment.environment_id is not None or KINDS[config.training.algorithm].samples


def compare(first: ComparedModel, second: ComparedModel, weights: Sequence[float] = (1.0,)) -> Comparison:
    """Compare two sides task by task, on the tasks that both have scored."""
    strata, notes, flips, num_tasks = [], [], list[Flip](), 0
    records = zip(weights, first.records, second.records, strict=True)
    for index, (weight, record, other_record) in enumerate(records):
        pairs = pair_up(record, other_record)
        if not pairs:
            raise ValueError(
                f"{first.name} and {second.name} have no scored task in common: {record.id} has "
                f"{len(record.outcomes)} tasks of {record.conditions.environment}, {other_record.id} has "
                f"{len(other_record.outcomes)} tasks of {other_record.conditions.environment}. "
                "Evaluate both with the same --env and --tasks"
            )
        notes += _compare_conditions(record, other_record, len(pairs))
        changes = [success_rate(b) - success_rate(a) for a, b in pairs]
        strata.append((weight, changes))
        num_tasks += len(pairs)
        flips += [_make_flip(index, *pair) for pair, change in zip(pairs, changes, strict=True) if change]
    wins = [flip for flip in flips if flip.success_rates[1] > flip.success_rates[0]]
    losses = [flip for flip in flips if flip.success_rates[1] < flip.success_rates[0]]
    if len(flips) < MIN_FLIPS:
        notes.append(
            f"only {len(flips)} of {num_tasks} tasks flipped, too few for significance; use more tasks"
        )
    p_value = statistics.compute_p_value(len(wins), len(losses))
    difference = statistics.bootstrap_mean(strata)
    return Comparison(first, second, difference, p_value, num_tasks, wins, losses, notes)


def _get_record(name: str, runs: str | Path, notify: Notify) -> StoredRecord | None:
    """Return the record with the id `name`, or the last one of a JSONL file `name`; None for other names."""
    if name.endswith(".jsonl"):
        records = read_records(Path(name).expanduser(), notify)
        if not records:
            raise ValueError(f"{name} contains no valid evaluation record")
        return StoredRecord(Path(name).expanduser(), records[-1])
    if not name.startswith("eval-") or is_run(Path(runs) / name):
        return None
    stored_by_id = {record.id: StoredRecord(file, record) for file, record in read_all_records(runs, notify)}
    if name not in stored_by_id:
        hint = did_you_mean(nearest(name, stored_by_id))
        raise ValueError(f"there is no evaluation record {name} in {runs}{hint}")
    return stored_by_id[name]


def _find_earlier_record(evaluation: RecordedEvaluation) -> StoredRecord | None:
    """Return the latest record of the same model under the same conditions; None if there is none."""
    file, model = evaluation.request.records_file, evaluation.model
    for record in reversed(read_records(file)):
        recorded_model = record.model
        is_same_model = recorded_model.digest == model.digest
        if recorded_model.digest is None:  # evaluated during training
            is_same_model = model.run_id is not None and (recorded_model.run_id, recorded_model.step) == (
                model.run_id,
                model.step,
            )
        if (
            is_same_model
            and recorded_model.options == model.options
            and record.conditions == evaluation.conditions
        ):
            return StoredRecord(file, record)
    return None


def pair_up(record: EvaluationRecord, other: EvaluationRecord) -> list[tuple[TaskOutcome, TaskOutcome]]:
    """Return pairs of the two records' outcomes, for all tasks that both have scored."""
    other_outcomes = {
        (outcome.task, outcome.digest): outcome for outcome in other.outcomes if outcome.scored_episodes
    }
    outcomes = [outcome for outcome in record.outcomes if outcome.scored_episodes]
    return [(a, b) for a in outcomes if (b := other_outcomes.get((a.task, a.digest))) is not None]


def _compare_conditions(record: EvaluationRecord, other: EvaluationRecord, num_pairs: int) -> list[str]:
    """Return one note for each difference between two records other than their models."""
    notes = []
    if differences := record.conditions.list_differences(other.conditions):
        texts = [text for text in differences if not text.startswith(("tasks ", "count "))]
        if any(text.startswith("rest ") for text in texts):
            texts = [text for text in texts if not text.startswith("rest ")]
            texts.append("environment, tools or reward differ")
        notes += [f"the conditions of {record.id} and {other.id} differ: {', '.join(texts)}"] if texts else []
    if num_skipped := max(len(record.outcomes), len(other.outcomes)) - num_pairs:
        notes.append(f"skipped {pluralize(num_skipped, 'task')} for which only one model has a score")
    return notes


def success_rate(outcome: TaskOutcome) -> float:
    return sum(outcome.scored_episodes) / len(outcome.scored_episodes)


def _make_flip(entry_index: int, outcome: TaskOutcome, other: TaskOutcome) -> Flip:
    has_improved = success_rate(other) > success_rate(outcome)

    def find_member(outcome: TaskOutcome, is_success: bool) -> int:
        return next((episode.member for episode in outcome.episodes if episode.success is is_success), 0)

    members = find_member(outcome, not has_improved), find_member(other, has_improved)
    return Flip(entry_index, outcome.task, (success_rate(outcome), success_rate(other)), members)


def _load_episodes(
    model: ComparedModel, flips: Sequence[Flip], side_index: int
) -> dict[tuple[int, str], Trajectory]:
    """Load the episodes of `flips` from the files that the records of a side name; `side_index` is 0 or 1."""
    episodes: dict[tuple[int, str], Trajectory] = {}
    for index, stored_record in enumerate(model.stored_records):
        keys = {(flip.task_id, flip.members[side_index]) for flip in flips if flip.entry_index == index}
        if not keys or stored_record is None or stored_record.record.episodes_file is None:
            continue
        path = stored_record.file.parent / stored_record.record.episodes_file
        if path.is_file():
            for episode in load_trajectories(path):
                if (episode.task.id, episode.member) in keys:
                    episodes[index, episode.task.id] = episode
    return episodes
