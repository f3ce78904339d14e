"""`tfactory eval`: how good a model or a run's result is on held-out tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from TrainingFactory.apps.views import run_tables
from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Count, Flags, Json, Overrides, places
from TrainingFactory.cli.rollout import summary, why_unscored
from TrainingFactory.config.loading import key_value

if TYPE_CHECKING:
    from TrainingFactory.evaluation.records import EvaluationRecord
    from TrainingFactory.evaluation.requests import RecordedEvaluation
    from TrainingFactory.evaluation.rollouts import Report

UNSCORED = 1  # exit status


def evaluate(
    model: Annotated[str, Parameter(name="model-or-run")],
    /,
    *overrides: Overrides,
    env: str | None = None,
    suite: str | None = None,
    episodes: Count | None = None,
    flags: Flags | None = None,
    out: Path | None = None,
    as_json: Json = False,
    replay: str | None = None,
) -> int:
    """Evaluate a model, or what a run has made, on held-out tasks. A run is scored by its own reward, as in its
    evaluations on the way; reward.type=environment asks for that of the environment. What comes of it is kept as a
    line of evaluations.jsonl in the run's folder, or in the runs folder for other models; `tfactory compare` reads it.

    ```
    tfactory eval runs/grpo-search-1
    tfactory eval runs/grpo-search-1 reward.type=environment
    tfactory eval agent@champion
    tfactory eval qwen3-4b --env search --tasks 200 --episodes 8
    tfactory eval runs/grpo-search-1 --suite release.yaml
    tfactory eval runs/warm/checkpoints/step-000160 --env calculator --temperature 0 --json
    ```

    Args:
        model: A run (its name or folder; its last checkpoint is taken, or sft@step-40), a checkpoint, a
            registered model (agent, agent:3, agent@champion), or a model.
        env: The environment; that of the run if none is named.
        suite: A YAML file with several environments or files of tasks, or a suite that is built in: builtin, quick.
        episodes: Episodes per task; with several, pass@k and pass^k are told.
        out: JSONL file for the episodes; one in the runs folder if none is named.
        replay: A recording whose tool calls are served again: that of an earlier evaluation with
            logging.record_tools=true.
    """
    # Imported here, so that help does not wait for it.
    from TrainingFactory.evaluation.requests import RecordedEvaluation, ask

    flags = flags or Flags()
    if flags.model is not None:
        raise ValueError("the model is named twice: give it once, without --model")
    if episodes is not None and flags.group_size is not None:
        raise ValueError("--episodes and --group-size are the same: give one")
    given = [*overrides, *flags.overrides()]
    if episodes is not None:
        given.append(key_value("training.group_size", episodes))
    if suite is not None:
        if env is not None or out is not None or replay is not None:
            raise ValueError("--env, --out and --replay are for one evaluation; a suite has several")
        return _suite(model, suite, given, as_json)
    evaluation = RecordedEvaluation(ask(model, given, env, show.note, *places(given)), out, replay, show.note)
    with Display(evaluation.total) as display:
        result = evaluation.run(display.episode)
    return _report(evaluation, result, as_json)


def _suite(model: str, source: str, overrides: list[str], as_json: bool) -> int:
    """Evaluate on every entry, print the table and return the exit status."""
    from TrainingFactory.evaluation.requests import ask_model
    from TrainingFactory.evaluation.suites import check_overrides, load_suite, suite_evaluations

    check_overrides(overrides)
    suite, folder = load_suite(source)
    asked, records = ask_model(model, overrides, *places(overrides)), []
    for evaluation in suite_evaluations(suite, asked, folder, show.note):
        if status := play(evaluation, str(evaluation.asked.entry)):
            return status
        records.append(evaluation.record)
    total = suite.total(records)
    if as_json:
        entries = {str(r.entry): r.metrics | {"record": r.id} for r in records}
        found = {"model": model, "suite": suite.name, "total": total.value}
        print(json.dumps(found | {"total_low": total.low, "total_high": total.high, "entries": entries}))
        return 0
    rows = [
        [str(record.entry), f"{entry.weight:g}", *record_row(record)]
        for record, entry in zip(records, suite.entries, strict=True)
    ]
    show.columns(["entry", "weight", *RECORD_COLUMNS], [*rows, ["total", "", "", str(total)]])
    show.note(f"recorded in {asked.records}")
    return 0


def play(evaluation: RecordedEvaluation, name: str) -> int:
    """Run one evaluation of several, and return the exit status: 0 where it has left a record."""
    show.note(f"{name}: {show.count(len(evaluation.tasks), 'task')}")
    with Display(evaluation.total) as display:
        result = evaluation.run(display.episode)
    if evaluation.record is not None:
        return 0
    show.fail(
        f"{name} was broken off, or no episode could be scored; without it there is nothing to say of the rest"
    )
    return show.INTERRUPTED if result.interrupted else UNSCORED


RECORD_COLUMNS = ("tasks", "success (95 % interval)", "pass^k", "turns", "tool success", "tokens", "record")


def record_row(record: EvaluationRecord) -> list[str]:
    """Return the RECORD_COLUMNS of a record."""
    found, asked = record.metrics, record.conditions
    interval = f"{found['success']:.3f} ({found['success_low']:.3f} to {found['success_high']:.3f})"
    every = f"{found[key]:.3f} of {asked.episodes}" if (key := f"pass^{asked.episodes}") in found else ""
    tools = f"{found['tool_success']:.3f}" if "tool_success" in found else ""
    turns, tokens = f"{found['turns']:.1f}", f"{found['sampled_tokens']:.0f}"
    return [str(asked.count), interval, every, turns, tools, tokens, record.id]


def _report(evaluation: RecordedEvaluation, result: Report, as_json: bool) -> int:
    """Print what came of it and return the exit status."""
    config, scored_by = evaluation.config, evaluation.scored_by
    metrics, played = result.metrics, result.trajectories
    record = evaluation.record
    if as_json:
        model, environment = config.model.adapter or config.model.name, config.environment.environment_id
        found = {"model": model, "environment": environment, "scored_by": scored_by} | metrics
        print(json.dumps(found if record is None else found | {"record": record.id}))
    else:
        spent = run_tables.asked_in_words([metrics])
        show.table([*success_rows(metrics), *summary(metrics, played), ("scored by", scored_by), *spent])
    if played:
        show.note(f"saved {show.count(len(played), 'episode')} to {evaluation.path}")
    if record is not None:
        show.note(f"recorded as {record.id} in {evaluation.asked.records}")
    if result.interrupted:
        return show.INTERRUPTED
    if "success" not in metrics:
        show.fail(f"no episode could be scored; mostly: {why_unscored(played)}")
        return UNSCORED
    return 0


def success_rows(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """Return the success with its interval, and with several episodes a task pass@k and pass^k."""
    if "success" not in metrics:
        return []
    interval = f"{metrics['success_low']:.3f} to {metrics['success_high']:.3f}"
    rows = [("success", f"{metrics['success']:.3f} (95 % interval {interval})")]
    for name in ("pass@", "pass^"):
        found = [(key.removeprefix(name), value) for key, value in metrics.items() if key.startswith(name)]
        if found:
            rows.append((f"{name}k", ", ".join(f"{k}: {value:.3f}" for k, value in found)))
    return rows
