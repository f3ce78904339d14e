"""Tables of a run's state and metrics, for `tfactory runs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.runs.folder import NOTES_KEY, RunFolder

# metric shown if the run has it -> format
METRIC_FORMATS = {
    "steps_per_second": "{:.3g}", "loss": "{:.4f}", "reward": "{:.3f}", "reward_std": "{:.3f}", "accuracy": "{:.3f}",
    "eval/success": "{:.3f}", "eval/loss": "{:.4f}", "eval/perplexity": "{:.3f}", "eval/accuracy": "{:.3f}",
    "eval/tool_success": "{:.3f}", "tool_success": "{:.3f}", "turns": "{:.2f}", "length": "{:.1f}",
    "length_max": "{:.0f}", "entropy": "{:.3f}", "kl": "{:.4f}", "grad_norm": "{:.3g}", "learning_rate": "{:.3g}",
    "tokens_per_second": "{:.0f}", "tokens_saved": "{:.1%}",
    **{f"seconds/{name}": "{:.2f}" for name in ("step", "generate", "tools", "reward", "update")},
    "episodes/failed": "{:.0f}",
    **{f"rows_left_out/{reason}": "{:.0f}" for reason in ("bad", "long", "unused")},
}  # fmt: skip
# label of a headline metric -> candidates, of which the first that the run has is shown
HEADLINE_METRICS = {
    "steps per second": ("steps_per_second",),
    "reward": ("reward",),
    "tool-call success": ("tool_success", "eval/tool_success"),
    "accuracy": ("eval/success", "eval/accuracy", "accuracy"),
}
PART_PREFIXES = {"reward": "reward/", "eval/success": "eval/reward/"}  # metric -> prefix of its parts
USAGE_PREFIXES = ("judge/", "pool/", "endpoint/")
MetricRows = Sequence[dict[str, Any]]


def list_state_rows(run: RunFolder) -> list[tuple[str, str]]:
    """Return (name, value) rows that describe a run and its progress."""
    status, run_info = run.status, run.run_info
    commit = f", commit {run_info['commit']}" if run_info["commit"] else ""
    return [
        ("state", run.state + (f": {status.reason}" if status.reason else "")),
        ("steps", f"{status.step} of {status.steps}, {timedelta(seconds=round(status.seconds))}"),
        ("model", run.config.model.name),
        ("training", summarize_training(run.config, run_info)),
        ("started", f"{run_info['started']}, torch {run_info['versions']['torch']}{commit}"),
        *(("resolved", note) for note in run_info.get(NOTES_KEY, ())),
    ]


def summarize_training(config: TrainingConfig, run_info: dict[str, Any]) -> str:
    """Return a run's algorithm and its environment or dataset, such as `grpo in search`."""
    algorithm, environment = config.training.algorithm, config.environment.environment_id
    if environment is not None:
        return f"{algorithm} in {environment}"
    if config.data.dataset is not None:
        return f"{algorithm} on {config.data.dataset}"
    objects = run_info.get("objects")
    if objects:
        return f"{algorithm} with {' and '.join(objects)} from Python"
    return f"{algorithm} in conversations"


def merge_metrics(metrics: MetricRows) -> dict[str, Any]:
    """Return the last value of each metric; a step need not have all metrics."""
    return {key: value for row in metrics for key, value in row.items()}


def select_metrics(metrics: MetricRows) -> dict[str, str]:
    """Return the metrics to show with their formats: those of METRIC_FORMATS that exist, each followed by its parts."""
    names = dict.fromkeys(key for row in metrics for key in row)
    formats: dict[str, str] = {}
    for key, number_format in METRIC_FORMATS.items():
        parts = [name for name in names if key in PART_PREFIXES and name.startswith(PART_PREFIXES[key])]
        formats |= dict.fromkeys([key, *parts] if key in names else parts, number_format)
    return formats


def label_metrics(metrics: MetricRows) -> Iterator[tuple[str, str, str]]:
    """Yield (label, metric, format) of all metrics to show, those of HEADLINE_METRICS first."""
    formats = select_metrics(metrics)
    for name, keys in HEADLINE_METRICS.items():
        if (key := next((key for key in keys if key in formats), None)) is not None:
            yield name if name == key else f"{name} ({key})", key, formats.pop(key)
    yield from ((key, key, number_format) for key, number_format in formats.items())


def sum_usage(metrics: MetricRows) -> dict[str, float]:
    """Sum the judge and pool metrics (requests, costs) over all steps, evaluations included."""
    totals: dict[str, float] = {}
    for row in metrics:
        for key, value in row.items():
            if (name := key.removeprefix("eval/")).startswith(USAGE_PREFIXES):
                totals[name] = totals.get(name, 0.0) + value
    return totals


def format_usage(metrics: MetricRows) -> Iterator[tuple[str, str]]:
    """Yield a row (name, text) with the nonzero counts of judges, then one with those of reward pools."""
    totals = sum_usage(metrics)
    for prefix in USAGE_PREFIXES:
        usage = {key.removeprefix(prefix): value for key, value in totals.items() if key.startswith(prefix)}
        summaries = [f"{name.replace('_', ' ')} {value:.6g}" for name, value in usage.items() if value]
        if summaries:
            yield prefix.removesuffix("/"), f"total: {', '.join(summaries)}"
