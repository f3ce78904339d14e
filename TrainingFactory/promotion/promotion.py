"""Promotion: an alias moves to a version only if that version passes a suite's gate against the alias's present
version."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from TrainingFactory.config.loading import key_value
from TrainingFactory.evaluation.comparison import ComparedModel, Comparison, compare
from TrainingFactory.evaluation.gate import GATE_KEYS, Gate, GateCheck, Guard, check_guard
from TrainingFactory.evaluation.records import EvaluationRecord, Notify, TaskOutcome
from TrainingFactory.evaluation.requests import RecordedEvaluation, make_model_request
from TrainingFactory.evaluation.suites import check_overrides, load_suite, make_suite_evaluations
from TrainingFactory.promotion import sequential
from TrainingFactory.registry.catalogue import Catalogue
from TrainingFactory.registry.rows import check_name
from TrainingFactory.types import Trajectory

Evaluator = Callable[[str, RecordedEvaluation], None]  # runs an evaluation; the text is the name of the model


@dataclass(slots=True)
class Decision:
    """Result of a promotion, which is also recorded in the registry."""

    promoted: bool
    text: str
    checks: list[GateCheck]
    sides: list[ComparedModel] = field(default_factory=list)
    comparison: Comparison | None = None


@dataclass(slots=True)
class SequentialTest:
    """Sequential test of a challenger against the champion's success rate on each task. The order of the tasks depends
    only on the seed."""

    task_order: list[str]
    champion_rates: list[float]
    min_difference: float
    alpha: float

    @classmethod
    def from_record(cls, champion: EvaluationRecord, gate: Gate) -> SequentialTest:
        champion_scores = champion.scored_episodes
        task_order = list(champion_scores)
        random.Random(f"promotion {champion.conditions.seed}").shuffle(task_order)
        champion_means = [_average(champion_scores[task]) for task in task_order]
        return cls(task_order, champion_means, gate.min_difference, gate.alpha)

    def compute_differences(self, challenger_scores: Mapping[str, Sequence[bool]]) -> list[float]:
        """Return the challenger's success rates minus the champion's, in order. Unscored tasks count as failed, so that
        a challenger cannot gain by making hard tasks unscorable."""
        rates = zip(self.task_order, self.champion_rates, strict=True)
        return [_average(challenger_scores[task]) - rate for task, rate in rates if task in challenger_scores]

    def is_proved(self, differences: Sequence[float]) -> bool:
        return sequential.find_rejection(differences, self.min_difference, self.alpha) is not None

    def can_be_proved(self, differences: Sequence[float]) -> bool:
        """Return whether the test would pass if the challenger solved all remaining tasks."""
        return self.is_proved([*differences, *(1 - rate for rate in self.champion_rates[len(differences) :])])

    def is_decided(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether the remaining tasks can no longer change the result of the test."""
        successes: dict[str, list[bool]] = {episode.task.id: [] for episode in trajectories}
        for episode in trajectories:
            if episode.reward is not None:
                successes[episode.task.id].append(episode.reward.outcome > 0)
        differences = self.compute_differences(successes)
        return self.is_proved(differences) or not self.can_be_proved(differences)


class Promotion:
    """The promotion of model version `name` to `alias`. The constructor checks all arguments and runs no evaluation;
    `criteria` is the gate as text. The champion plays all tasks, unless an equal evaluation of it is recorded. The
    challenger plays in rounds until the sequential test is decided."""

    def __init__(
        self, registry: Catalogue, name: str, alias: str, suite: str, first: bool = False,
        overrides: Sequence[str] = (), runs: str | Path = "runs", notify: Notify = lambda _: None,
    ) -> None:  # fmt: skip
        check_name(alias, "alias")
        check_overrides(overrides)
        self.registry, self.alias = registry, alias
        self.version = registry.get(name)
        versions = registry.versions(self.version.model)
        self.champion = next((version for version in versions if alias in version.aliases), None)
        self.target = f"{self.version.model}@{alias}"
        if self.champion is not None and (first or self.champion.number == self.version.number):
            raise ValueError(f"{self.target} is already {self.champion}{'. Remove --first' if first else ''}")
        if self.champion is None and not first:
            raise ValueError(
                f"there is no {self.target} to compare {self.version} with. Use --first, which checks only the guards "
                "with an absolute limit (at_least, at_most)"
            )
        self.suite, folder = load_suite(suite)
        if self.suite.gate is None:
            raise ValueError(f"suite {suite} has no gate. Add a section `gate:` with {GATE_KEYS}")
        self.gate = self.suite.gate
        entries = {entry.title: entry for entry in self.suite.entries}
        self.main_entry = self.gate.entry or self.suite.entries[0].title
        entry_titles = [self.main_entry, *(guard.entry or self.main_entry for guard in self.gate.guards)]
        self.titles = list(dict.fromkeys(entry_titles))  # other entries of the suite are not evaluated
        required_suite = self.suite.model_copy(update={"entries": [entries[title] for title in self.titles]})
        options = [*overrides, key_value("logging.output_dir", str(runs))]
        self.models = [
            ComparedModel(str(model)) for model in (self.champion, self.version) if model is not None
        ]
        for compared_model in self.models:
            model = make_model_request(compared_model.name, options, runs, registry.path)
            for evaluation in make_suite_evaluations(required_suite, model, folder, notify):
                compared_model.add_evaluation(evaluation)
        self.criteria = self.gate.describe(self.main_entry, first)

    def run(self, evaluate: Evaluator | None = None) -> Decision:
        """Run the evaluations that are needed, decide, and record the decision in the registry."""
        evaluate = evaluate or _run_evaluation
        try:
            checks = [] if self.champion is None else [self._run_sequential_test(evaluate)]
            if all(check.holds for check in checks):
                for entry_index in range(len(self.titles)):
                    for model in self.models:
                        self._run_entry(model, entry_index, evaluate)
                checks += [self._check_guard(guard) for guard in self.gate.pick_guards(self.champion is None)]
        finally:
            for evaluation in (evaluation for model in self.models for evaluation in model.evaluations):
                if evaluation is not None and evaluation.record is None:
                    evaluation.discard()
        return self._decide(checks)

    def _run_sequential_test(self, evaluate: Evaluator) -> GateCheck:
        """Run the sequential test: the challenger plays in rounds until the test is decided."""
        champion, challenger = self.models
        self._run_entry(champion, 0, evaluate)
        sequential_test = SequentialTest.from_record(champion.records[0], self.gate)
        if not sequential_test.can_be_proved([]):
            solved = f"{sum(sequential_test.champion_rates):g} of {len(sequential_test.champion_rates)} tasks"
            reason = f"{champion.name} already solves {solved}, so no challenger can pass the test"
            return GateCheck(self.criteria[0], False, f"{reason}; use more or harder tasks, or set not_worse")
        if (evaluation := challenger.evaluations[0]) is not None:
            tasks, size = {task.id: task for task in evaluation.tasks}, self.gate.round
            playlist = [tasks[task] for task in sequential_test.task_order]
            evaluation.rounds = [playlist[start : start + size] for start in range(0, len(playlist), size)]
            evaluation.should_stop = sequential_test.is_decided
        self._run_entry(challenger, 0, evaluate)
        challenger_scores = {
            name: outcome.scored_episodes for name, outcome in _get_outcomes_by_task(challenger, 0).items()
        }
        differences = sequential_test.compute_differences(challenger_scores)
        num_tasks = len(differences)
        lower_bound = sequential.compute_lower_bound(differences, sequential_test.alpha)
        progress_text = f"{num_tasks} of {len(sequential_test.task_order)} tasks"
        detail = f"difference {sum(differences) / num_tasks:+.3f} after {progress_text}, lower bound {lower_bound:+.3f}"
        detail += f"; needed: above {sequential_test.min_difference:+.3f}"
        return GateCheck(self.criteria[0], sequential_test.is_proved(differences), detail)

    def _check_guard(self, guard: Guard) -> GateCheck:
        entry_index = self.titles.index(guard.entry or self.main_entry)
        outcomes = [_get_outcomes_by_task(model, entry_index) for model in self.models]
        common_tasks = [task for task in outcomes[-1] if task in outcomes[0]]
        *champion_outcomes, challenger_outcomes = [
            [task_outcomes[task] for task in common_tasks] for task_outcomes in outcomes
        ]
        return check_guard(
            guard, self.main_entry, challenger_outcomes, champion_outcomes[0] if champion_outcomes else None
        )

    def _run_entry(self, model: ComparedModel, entry_index: int, evaluate: Evaluator) -> None:
        """Evaluate a model on the suite entry at `entry_index`, unless the evaluation is recorded."""
        evaluation = model.evaluations[entry_index]
        if model.stored_records[entry_index] is None and evaluation is not None:
            evaluate(model.name, evaluation)
            model.collect_records()
            if model.stored_records[entry_index] is None:
                raise ValueError(
                    f"no decision: the evaluation of {model.name} on {self.titles[entry_index]} was interrupted, or no "
                    "episode could be scored"
                )

    def _decide(self, checks: list[GateCheck]) -> Decision:
        """Move the alias if all checks hold, and record the decision with its evidence."""
        failed_checks = [str(check) for check in checks if not check.holds]
        indices = [
            i for i in range(len(self.titles)) if all(model.stored_records[i] for model in self.models)
        ]
        models = [
            ComparedModel(model.name, [model.stored_records[i] for i in indices]) for model in self.models
        ]
        comparison = compare(models[0], models[1], [1.0] * len(indices)) if indices and models[1:] else None
        evidence = {
            "suite": self.suite.name,
            "gate": self.gate.model_dump(exclude_none=True),
            "checks": [asdict(check) for check in checks],
            "records": {model.name: [record.id for record in model.records] for model in models},
            "comparison": None if comparison is None else comparison.as_json(),
        }
        previous_number = None if self.champion is None else self.champion.number
        if not failed_checks:
            try:
                self.registry.set_alias(str(self.version), self.alias, "promote", evidence, previous_number)
            except ValueError as error:  # another process moved the alias in the meantime
                failed_checks = [str(error)]
        reason = "; ".join(failed_checks) or "the gate holds"
        if failed_checks:
            evidence |= {"reason": reason}
            self.registry.record_decision(str(self.version), self.alias, "refuse", evidence)
        return Decision(not failed_checks, reason, checks, models, comparison)


def _run_evaluation(name: str, evaluation: RecordedEvaluation) -> None:
    evaluation.run()


def _get_outcomes_by_task(model: ComparedModel, entry_index: int) -> dict[str, TaskOutcome]:
    stored_record = model.stored_records[entry_index]
    assert stored_record is not None
    return {outcome.task: outcome for outcome in stored_record.record.outcomes}


def _average(successes: Sequence[bool]) -> float:
    return sum(successes) / len(successes) if successes else 0.0
