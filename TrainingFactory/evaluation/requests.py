"""What is to be evaluated, in words of a user, as a config; and an evaluation that leaves a record."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from TrainingFactory.assembly.named_files import changed_files
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.names import full_key
from TrainingFactory.evaluation import evaluation as evaluations
from TrainingFactory.evaluation.evaluation import Evaluation
from TrainingFactory.evaluation.identity import conditions, identity
from TrainingFactory.evaluation.records import (
    EvaluationRecord,
    Say,
    append_record,
    make_record,
    tasks_digest,
)
from TrainingFactory.evaluation.rollouts import Report
from TrainingFactory.registry.catalogue import Catalogue, registry_path
from TrainingFactory.registry.rows import Version
from TrainingFactory.resolve.model_names import Maker, Named, find_model
from TrainingFactory.runs.folder import EVALUATIONS, RunFolder
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Task, Trajectory

# Keys of the config that belong to the model and not to what it is asked.
OF_THE_MODEL = ("model.", "logging.", "training.seed")
OTHER_REWARD = ("reward.type", "reward.parts")  # who names one of these wants another reward than the run's
# kind of Python object -> how a command names what stands for it
NAMED_BY = {"environment": "--env FILE.py", "tools": "'tools=[\"FILE.py:NAME\"]'", "tasks": "data.tasks=FILE"}


@dataclass(slots=True)
class Asked:
    """A model by the name that a user gave it, with the config to evaluate it by, and the run that made it, if any."""

    name: str
    config: TrainingConfig
    run: RunFolder | None = None
    step: int | None = None
    suite: str | None = None
    entry: str | None = None
    version: Version | None = None  # where it is a registered model, with the registry's file
    registry: Path | None = None

    @property
    def records(self) -> Path:
        """Return the file that its records go to."""
        folder = Path(self.config.logging.output_dir).expanduser() if self.run is None else self.run.path
        return folder / EVALUATIONS

    def keep(self, record: EvaluationRecord) -> None:
        """Write the record to its file, and to the registry where the model is registered."""
        append_record(self.records, record)
        if self.version is not None and self.registry is not None:
            Catalogue(self.registry).add_evaluation(str(self.version), record.model_dump(mode="json"))

    def under(self, config: TrainingConfig, suite: str | None = None, entry: str | None = None) -> Asked:
        """Return the same model under the conditions of another config."""
        config = config.model_copy(update={"model": self.config.model})
        return replace(self, config=config, suite=suite, entry=entry)


class RecordedEvaluation(Evaluation):
    """Plays the episodes and writes a record of them. One that was broken off, or of which no episode could be scored,
    leaves none."""

    def __init__(
        self,
        asked: Asked,
        out: Path | None = None,
        replay: str | Path | None = None,
        say: Say = lambda _: None,
    ) -> None:
        super().__init__(asked.config, out, replay, say)
        self.asked, self.record = asked, None
        self.conditions = conditions(asked.config, self.tasks, self.group_size)
        self.model = identity(asked.config.model, asked.name, asked.run, asked.step)

    async def run_async(self, on_episode: Callable[[Trajectory], None] = lambda _: None) -> Report:
        report = await super().run_async(on_episode)
        if report.interrupted or "success" not in report.metrics:
            return report
        asked, file = self.asked, self.asked.records
        episodes = os.path.relpath(self.path.resolve(), file.parent.resolve())
        done = {each.task.id for each in report.trajectories}
        tasks = [task for task in self.tasks if task.id in done]  # fewer where these were enough
        under = self.conditions.model_copy(update={"tasks": tasks_digest(tasks), "count": len(tasks)})
        self.record: EvaluationRecord | None = make_record(
            report.trajectories, self.model, under, report.metrics, by="eval", scored_by=self.scored_by,
            suite=asked.suite, entry=asked.entry, episodes_file=episodes,
        )  # fmt: skip
        report.metrics = self.record.metrics
        await in_thread(asked.keep, self.record)
        return report


def record_of_training(
    config: TrainingConfig, run: RunFolder, tasks: Sequence[Task], scored_by: str, given: Sequence[str],
    step: int, played: Sequence[Trajectory], metrics: dict[str, float],
) -> None:  # fmt: skip
    """Append what a run's model did after so many steps. `given` are the kinds of Python objects in place of what the
    config names: they have no digest, so that evaluations of other runs are never taken to be under the same
    conditions."""
    own = [*given, run.about.get("id")] if given else []
    model = identity(config.model, f"{run.name}@step-{step}", run, step, saved=False)
    scored_by = "a reward from Python" if "reward" in given else scored_by
    asked = conditions(config, tasks, 1, own)
    record = make_record(played, model, asked, metrics, by="training", scored_by=scored_by)
    append_record(run.path / EVALUATIONS, record)


def ask_model(
    model: str, overrides: Sequence[str] = (), runs: str | Path = "runs", registry: str | Path | None = None
) -> Asked:
    """Return a model or what a run has made, under no conditions of its own: for a suite, or those of another."""
    found = find_model(model, runs, registry)
    given = evaluations.overrides_of({"model": evaluations.sections_of(found)["model"]})
    own = [each for each in overrides if full_key(each.partition("=")[0].strip()).startswith(OF_THE_MODEL)]
    return _asked(found, load_config(None, [*given, *own]), registry_path(runs, registry))


def ask(
    model: str, overrides: Sequence[str] = (), env: str | None = None, say: Say = lambda _: None,
    runs: str | Path = "runs", registry: str | Path | None = None,
) -> Asked:  # fmt: skip
    """Return a model, or what a run has made with the environment, held-out tasks, sampling and reward of that run."""
    sections: dict[str, dict[str, Any]] = {"data": {"split": "heldout", "count": 64}}
    found, learned = find_model(model, runs, registry), {}
    sections |= evaluations.sections_of(found)
    if found.maker is not None:
        other = any(full_key(each.partition("=")[0].strip()) in OTHER_REWARD for each in overrides)
        sections |= _reward(found.maker, other, say)
        learned = evaluations.learned_tasks(found.maker) if env is None else {}
        sections["data"] |= learned
    given = evaluations.overrides_of(sections)
    if env is not None:
        given.append(key_value("environment.environment_id", env))
    config = load_config(None, [*given, *overrides])
    if found.maker is not None:
        _check_objects(found.maker, config, env is not None)
    if learned and config.data.tasks == learned["tasks"]:
        say(
            "note: the run has no held-out tasks, so these are those it learned from; name others: --tasks FILE"
        )
    return _asked(found, config, registry_path(runs, registry))


def _asked(found: Named, config: TrainingConfig, registry: Path) -> Asked:
    run, number = found.maker, re.fullmatch(r"step-(\d+)", found.folder.name if found.folder else "")
    if not isinstance(run, RunFolder):
        return Asked(found.written, config, version=found.version, registry=registry)
    return Asked(found.written, config, run, int(number[1]) if number else None)


def _reward(run: Maker, other: bool, say: Say) -> dict[str, dict[str, Any]]:
    """Return the reward section of the run, if no other reward is asked for."""
    for name in changed_files(run.about):
        say(f"note: {name} has changed since run {run.name} was started")
    reward = None if other else evaluations.reward_of(run)
    if reward is None and not other:
        say(
            f"note: run {run.name} was started from Python with a reward of its own, which cannot be restored here; "
            "the environment's own reward scores instead"
        )
    return {} if reward is None else {"reward": reward.model_dump()}


def _check_objects(run: Maker, config: TrainingConfig, other_environment: bool) -> None:
    """Raise where a run was started with Python objects in whose place the config names nothing."""
    environment, tasks = config.environment.environment_id, config.data.tasks
    named = {
        "environment": environment,
        "tools": config.tools or other_environment,
        "tasks": tasks or environment,
    }
    given = [kind for kind in run.about.get("objects", []) if kind in named]
    if missing := [NAMED_BY[kind] for kind in given if not named[kind]]:
        raise ValueError(
            f"run {run.name} was started from Python with its own {' and '.join(given)}, which its folder does not "
            f"hold; name what is missing: {' '.join(missing)}"
        )
