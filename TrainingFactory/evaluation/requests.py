"""Evaluation requests: the config for evaluating a model that a user names, and an evaluation that saves a record."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from TrainingFactory.assembly.named_files import find_changed_files
from TrainingFactory.config import TrainingConfig, load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.config.names import expand_key
from TrainingFactory.evaluation import evaluation as evaluations
from TrainingFactory.evaluation.evaluation import Evaluation
from TrainingFactory.evaluation.identity import identify_model, make_conditions
from TrainingFactory.evaluation.records import (
    EvaluationRecord,
    Notify,
    append_record,
    digest_tasks,
    make_record,
)
from TrainingFactory.evaluation.rollouts import RolloutReport
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.registry.rows import Version
from TrainingFactory.resolve.model_names import ResolvedModel, TrainedBy, find_model
from TrainingFactory.runs.folder import EVALUATIONS, RunFolder
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Task, Trajectory

# Prefixes of config keys that belong to the model and not to the conditions of the evaluation.
MODEL_KEYS = ("model.", "logging.", "training.seed")
REWARD_KEYS = ("reward.type", "reward.parts")  # an override of these replaces the run's reward
# kind of Python object -> option that replaces it in a command
REPLACEMENT_OPTIONS = {
    "environment": "--env FILE.py", "tools": "'tools=[\"FILE.py:NAME\"]'", "tasks": "data.tasks=FILE",
}  # fmt: skip


@dataclass(slots=True)
class EvaluationRequest:
    """Request to evaluate a model: its name, the evaluation's config, and the run that trained it, if any."""

    name: str
    config: TrainingConfig
    run: RunFolder | None = None
    step: int | None = None
    suite: str | None = None
    entry: str | None = None
    version: Version | None = None  # of a registered model
    registry_file: Path | None = None

    @property
    def records_file(self) -> Path:
        """Return the JSONL file to which the evaluation's record is appended."""
        folder = Path(self.config.logging.output_dir).expanduser() if self.run is None else self.run.path
        return folder / EVALUATIONS

    def save_record(self, record: EvaluationRecord) -> None:
        """Append the record to its file, and to the registry if the model is registered."""
        append_record(self.records_file, record)
        if self.version is not None and self.registry_file is not None:
            Catalogue(self.registry_file).add_evaluation(str(self.version), record.model_dump(mode="json"))

    def with_conditions(
        self, config: TrainingConfig, suite: str | None = None, entry: str | None = None
    ) -> EvaluationRequest:
        """Return a request for the same model under the conditions of another config."""
        config = config.model_copy(update={"model": self.config.model})
        return replace(self, config=config, suite=suite, entry=entry)


class RecordedEvaluation(Evaluation):
    """Evaluation that saves a record, unless it was interrupted or all episodes are unscored."""

    def __init__(
        self,
        request: EvaluationRequest,
        path: Path | None = None,
        replay: str | Path | None = None,
        notify: Notify = lambda _: None,
    ) -> None:
        super().__init__(request.config, path, replay, notify)
        self.request, self.record = request, None
        self.conditions = make_conditions(request.config, self.tasks, self.group_size)
        self.model = identify_model(request.config.model, request.name, request.run, request.step)

    async def run_async(self, on_episode: Callable[[Trajectory], None] = lambda _: None) -> RolloutReport:
        report = await super().run_async(on_episode)
        if report.interrupted or "success" not in report.metrics:
            return report
        request = self.request
        episodes_file = os.path.relpath(self.path.resolve(), request.records_file.parent.resolve())
        task_ids = {episode.task.id for episode in report.trajectories}
        tasks = [task for task in self.tasks if task.id in task_ids]  # not all if a test stopped early
        conditions = self.conditions.model_copy(update={"tasks": digest_tasks(tasks), "count": len(tasks)})
        self.record: EvaluationRecord | None = make_record(
            report.trajectories, self.model, conditions, report.metrics, by="eval", scored_by=self.scored_by,
            suite=request.suite, entry=request.entry, episodes_file=episodes_file,
        )  # fmt: skip
        report.metrics = self.record.metrics
        await in_thread(request.save_record, self.record)
        return report


def append_training_record(
    config: TrainingConfig, run: RunFolder, tasks: Sequence[Task], scored_by: str, object_kinds: Sequence[str],
    step: int, episodes: Sequence[Trajectory], metrics: dict[str, float],
) -> None:  # fmt: skip
    """Append the record of an evaluation during training, after `step` steps. `object_kinds` are the kinds of Python
    objects that replace parts of the config. They have no digest, so the conditions then include the run's id and
    match no other run."""
    extra_inputs = [*object_kinds, run.run_info.get("id")] if object_kinds else []
    model = identify_model(config.model, f"{run.name}@step-{step}", run, step, is_saved=False)
    scored_by = "a reward from Python" if "reward" in object_kinds else scored_by
    evaluation_conditions = make_conditions(config, tasks, 1, extra_inputs)
    record = make_record(episodes, model, evaluation_conditions, metrics, by="training", scored_by=scored_by)
    append_record(run.path / EVALUATIONS, record)


def make_model_request(
    model: str, overrides: Sequence[str] = (), runs: str | Path = "runs", registry: str | Path | None = None
) -> EvaluationRequest:
    """Return a request with only the model's own options; a suite or another request adds the conditions."""
    resolved_model = find_model(model, runs, registry)
    model_section = evaluations.make_sections(resolved_model)["model"]
    model_defaults = evaluations.make_overrides({"model": model_section})
    overrides = [option for option in overrides if _get_option_key(option).startswith(MODEL_KEYS)]
    config = load_config(None, [*model_defaults, *overrides])
    return _make_request(resolved_model, config, get_registry_path(runs, registry))


def ask(
    model: str, overrides: Sequence[str] = (), env: str | None = None, notify: Notify = lambda _: None,
    runs: str | Path = "runs", registry: str | Path | None = None,
) -> EvaluationRequest:  # fmt: skip
    """Return a request to evaluate a model on held-out tasks. For the checkpoint of a run, the defaults of environment,
    tasks, sampling and reward are those of the run."""
    sections: dict[str, dict[str, Any]] = {"data": {"split": "heldout", "count": 64}}
    resolved_model, task_options = find_model(model, runs, registry), {}
    sections |= evaluations.make_sections(resolved_model)
    if resolved_model.run is not None:
        replaces_reward = any(_get_option_key(option) in REWARD_KEYS for option in overrides)
        sections |= _make_reward_section(resolved_model.run, replaces_reward, notify)
        task_options = evaluations.get_task_options(resolved_model.run) if env is None else {}
        sections["data"] |= task_options
    default_overrides = evaluations.make_overrides(sections)
    if env is not None:
        default_overrides.append(key_value("environment.environment_id", env))
    config = load_config(None, [*default_overrides, *overrides])
    if resolved_model.run is not None:
        _check_objects(resolved_model.run, config, env is not None)
    if task_options and config.data.tasks == task_options["tasks"]:
        notify("note: the run has no held-out tasks, so its training tasks are used. To change: --tasks FILE")
    return _make_request(resolved_model, config, get_registry_path(runs, registry))


def _get_option_key(option: str) -> str:
    """Return the full config key of a key=value option."""
    return expand_key(option.partition("=")[0].strip())


def _make_request(model: ResolvedModel, config: TrainingConfig, registry_file: Path) -> EvaluationRequest:
    run, step_match = model.run, re.fullmatch(r"step-(\d+)", model.folder.name if model.folder else "")
    if not isinstance(run, RunFolder):
        return EvaluationRequest(model.query, config, version=model.version, registry_file=registry_file)
    return EvaluationRequest(model.query, config, run, int(step_match[1]) if step_match else None)


def _make_reward_section(run: TrainedBy, is_replaced: bool, notify: Notify) -> dict[str, dict[str, Any]]:
    """Return the run's config section `reward`; empty if the user replaced it or it was a Python object."""
    for name in find_changed_files(run.run_info):
        notify(f"note: {name} has changed since run {run.name} was started")
    reward = None if is_replaced else evaluations.load_run_reward(run)
    if reward is None and not is_replaced:
        notify(
            f"note: the reward of run {run.name} was a Python object, which cannot be restored here. The environment's "
            "own reward scores instead"
        )
    return {} if reward is None else {"reward": reward.model_dump()}


def _check_objects(run: TrainedBy, config: TrainingConfig, has_other_environment: bool) -> None:
    """Raise ValueError if a run was started with Python objects that the config does not replace."""
    environment = config.environment.environment_id
    replacements = {
        "environment": environment,
        "tools": config.tools or has_other_environment,
        "tasks": config.data.tasks or environment,
    }
    object_kinds = [kind for kind in run.run_info.get("objects", []) if kind in replacements]
    if missing_options := [REPLACEMENT_OPTIONS[kind] for kind in object_kinds if not replacements[kind]]:
        raise ValueError(
            f"run {run.name} was started from Python with its own {' and '.join(object_kinds)}, which cannot be "
            f"restored from its folder. Add to the command: {' '.join(missing_options)}"
        )
