"""`tfactory eval`: evaluate a model or a run on held-out tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from TrainingFactory.apps.views import run_tables
from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Count, Flags, Json, Overrides, get_storage_paths
from TrainingFactory.cli.rollout import find_main_error, make_summary_rows
from TrainingFactory.config.loading import key_value

if TYPE_CHECKING:
    from TrainingFactory.common.endpoints.budget import Budget
    from TrainingFactory.evaluation.records import EvaluationRecord
    from TrainingFactory.evaluation.requests import RecordedEvaluation
    from TrainingFactory.evaluation.rollouts import RolloutReport

UNSCORED_STATUS = 1  # exit status


def evaluate(
    model: Annotated[str, Parameter(name="model-or-run")], /, *overrides: Overrides, env: str | None = None,
    suite: str | None = None, episodes: Count | None = None, flags: Flags | None = None, out: Path | None = None,
    as_json: Json = False, replay: str | None = None,
) -> int:  # fmt: skip
    """Evaluate a model or a run on held-out tasks.

    A run is scored by its own reward, as in the evaluations during training; reward.type=environment uses the
    environment's reward. The result is appended to evaluations.jsonl in the run's folder, or in the runs folder for
    other models; `tfactory compare` reads it.

    ```
    tfactory eval runs/grpo-search-1
    tfactory eval runs/grpo-search-1 reward.type=environment
    tfactory eval agent@champion
    tfactory eval qwen3-4b --env search --tasks 200 --episodes 8
    tfactory eval runs/grpo-search-1 --suite release.yaml
    tfactory eval runs/warm/checkpoints/step-000160 --env calculator --temperature 0 --json
    ```

    Args:
        model: Run name or folder (its last checkpoint; sft@step-40 selects another), checkpoint, registered model
            (agent, agent:3, agent@champion), or model name.
        env: Environment. Default: that of the run.
        suite: YAML file with several environments or task files, or a built-in suite: builtin or quick.
        episodes: Episodes per task. With more than one, pass@k and pass^k are reported.
        out: JSONL file for the episodes. Default: a new file in the runs folder.
        replay: Recorded tool results to replay, from an earlier evaluation with logging.record_tools=true.
    """
    # Imported here because it is slow: --help should appear at once.
    from TrainingFactory.evaluation.requests import RecordedEvaluation, ask

    flags = flags or Flags()
    if flags.model is not None:
        raise ValueError("the model is named twice. Remove --model.")
    if episodes is not None and flags.group_size is not None:
        raise ValueError("--episodes and --group-size mean the same. Remove one of them.")
    options = [*overrides, *flags.list_overrides()]
    if episodes is not None:
        options.append(key_value("training.group_size", episodes))
    if suite is not None:
        if env is not None or out is not None or replay is not None:
            raise ValueError("--env, --out and --replay cannot be combined with --suite. Remove them.")
        return _evaluate_suite(model, suite, options, as_json)
    request = ask(model, options, env, show.note, *get_storage_paths(options))
    evaluation = RecordedEvaluation(request, out, replay, show.note)
    with Display(evaluation.num_episodes, loads_model=evaluation.loads_model) as display:
        result = evaluation.run(display.episode)
    return _print_result(evaluation, result, as_json)


def _evaluate_suite(model: str, suite_name: str, overrides: list[str], as_json: bool) -> int:
    """Evaluate the model on every entry of the suite, print the table and return the exit status."""
    from TrainingFactory.evaluation.requests import make_model_request
    from TrainingFactory.evaluation.suites import check_overrides, load_suite, make_suite_evaluations

    check_overrides(overrides)
    suite, folder = load_suite(suite_name)
    request = make_model_request(model, overrides, *get_storage_paths(overrides))
    records = []
    for evaluation in make_suite_evaluations(suite, request, folder, show.note):
        if status := run_evaluation(evaluation, str(evaluation.request.entry)):
            return status
        records.append(evaluation.record)
    score = suite.estimate_total(records)
    if as_json:
        entries = {str(record.entry): record.metrics | {"record": record.id} for record in records}
        summary = {"model": model, "suite": suite.name, "total": score.value}
        print(json.dumps(summary | {"total_low": score.low, "total_high": score.high, "entries": entries}))
        return 0
    rows = [
        [str(record.entry), f"{entry.weight:g}", *list_cells(record)]
        for record, entry in zip(records, suite.entries, strict=True)
    ]
    show.print_columns(["entry", "weight", *RECORD_COLUMNS], [*rows, ["total", "", "", str(score)]])
    show.note(f"recorded in {request.records_file}")
    return 0


def run_evaluation(evaluation: RecordedEvaluation, name: str) -> int:
    """Run one of several evaluations and return the exit status: 0 if it was recorded."""
    show.note(f"{name}: {show.pluralize(len(evaluation.tasks), 'task')}")
    with Display(evaluation.num_episodes, loads_model=evaluation.loads_model) as display:
        result = evaluation.run(display.episode)
    if evaluation.record is not None:
        return 0
    reason = "was interrupted" if result.interrupted else "has no scored episode"
    show.print_error(f"{name} {reason}; the remaining evaluations were not run")
    return show.INTERRUPTED_STATUS if result.interrupted else UNSCORED_STATUS


RECORD_COLUMNS = (
    "tasks", "success (95 % interval)", "pass^k", "turns", "tool success", "tokens", "cost", "record"
)  # fmt: skip


def list_cells(record: EvaluationRecord, prices: Budget | None = None) -> list[str]:
    """Return the cells of a record in the order of RECORD_COLUMNS. `prices` are those of an endpoint."""
    metrics, conditions = record.metrics, record.conditions
    success = f"{metrics['success']:.3f} ({metrics['success_low']:.3f} to {metrics['success_high']:.3f})"
    pass_key = f"pass^{conditions.episodes}"
    pass_text = f"{metrics[pass_key]:.3f} of {conditions.episodes}" if pass_key in metrics else ""
    tool_success = f"{metrics['tool_success']:.3f}" if "tool_success" in metrics else ""
    turns, tokens = f"{metrics['turns']:.1f}", f"{metrics['sampled_tokens']:.0f}"
    cost = format_cost(metrics, prices)
    return [str(conditions.count), success, pass_text, turns, tool_success, tokens, cost, record.id]


def format_cost(metrics: dict[str, float], prices: Budget | None = None) -> str:
    """Return the cost of the episodes as money or, without prices, as billed tokens; for a local model as time."""
    if "endpoint/input_tokens" not in metrics:
        return f"{metrics['seconds']:.0f} s here" if "seconds" in metrics else ""
    if prices is not None and prices.has_prices:
        return f"{prices.cost_of(metrics['endpoint/input_tokens'], metrics['endpoint/output_tokens']):.4g}"
    if "endpoint/cost" in metrics:
        return f"{metrics['endpoint/cost']:.4g}"
    return f"{metrics['endpoint/input_tokens']:.0f} tokens in"


def _print_result(evaluation: RecordedEvaluation, result: RolloutReport, as_json: bool) -> int:
    """Print the result of an evaluation and return the exit status."""
    config, scored_by = evaluation.config, evaluation.scored_by
    metrics, episodes = result.metrics, result.trajectories
    record = evaluation.record
    if as_json:
        model, environment = config.model.adapter or config.model.name, config.environment.environment_id
        result_values = {"model": model, "environment": environment, "scored_by": scored_by} | metrics
        print(json.dumps(result_values if record is None else result_values | {"record": record.id}))
    else:
        judge_cost = run_tables.format_usage([metrics])
        rows = [*make_success_rows(metrics), *make_summary_rows(metrics, episodes), ("scored by", scored_by)]
        show.print_table([*rows, *judge_cost])
    if episodes:
        show.note(f"saved {show.pluralize(len(episodes), 'episode')} to {evaluation.path}")
    if record is not None:
        show.note(f"recorded as {record.id} in {evaluation.request.records_file}")
    if result.interrupted:
        return show.INTERRUPTED_STATUS
    if "success" not in metrics:
        show.print_error(f"no episode could be scored. Most frequent reason: {find_main_error(episodes)}")
        return UNSCORED_STATUS
    return 0


def make_success_rows(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """Return table rows for success with its 95 % interval, pass@k and pass^k."""
    if "success" not in metrics:
        return []
    interval = f"{metrics['success_low']:.3f} to {metrics['success_high']:.3f}"
    rows = [("success", f"{metrics['success']:.3f} (95 % interval {interval})")]
    for name in ("pass@", "pass^"):
        values = [(key.removeprefix(name), value) for key, value in metrics.items() if key.startswith(name)]
        if values:
            rows.append((f"{name}k", ", ".join(f"{k}: {value:.3f}" for k, value in values)))
    return rows
