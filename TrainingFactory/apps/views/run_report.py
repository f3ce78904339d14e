"""A run as one HTML page: its state, its findings, its curves, some episodes and its config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from TrainingFactory.apps.reports.pages import render
from TrainingFactory.apps.views.run_tables import list_state_rows
from TrainingFactory.apps.views.runs import list_findings
from TrainingFactory.common.charts import Chart, Curve
from TrainingFactory.runs.episode_texts import format_ending, list_lines_with_images, pick_best_and_worst
from TrainingFactory.runs.folder import CONFIG, TRAJECTORIES, RunFolder
from TrainingFactory.types import Trajectory

# title of a chart -> metrics in it, with their labels
CURVES: dict[str, dict[str, str]] = {
    "Loss": {"loss": "training", "eval/loss": "held-out"},
    "Share of episodes rewarded": {"accuracy": "accuracy"},
    "KL to the reference": {"kl": "KL"},
    "Entropy": {"entropy": "entropy"},
    "Clip fraction": {"clip_fraction": "clip fraction"},
    "Gradient norm": {"grad_norm": "gradient norm"},
    "Sampled tokens per episode": {"length": "mean", "length_max": "longest"},
    "Tool-call success": {"tool_success": "tool success"},
    "Seconds by phase": {
        "seconds/generate": "generate", "seconds/update": "update", "seconds/reward": "reward",
        "eval/seconds": "evaluate",
    },
}  # fmt: skip
SHARE_METRICS = {"accuracy", "tool_success"}  # drawn from 0 to 1
# Drawn from 0 on.
ZERO_BASED = {"clip_fraction", "entropy", "grad_norm", "length", "length_max", *CURVES["Seconds by phase"]}
MetricRows = Sequence[dict[str, Any]]


def render_run_page(run: RunFolder) -> str:
    """Return the report as a self-contained HTML page."""
    versions = ", ".join(f"{name} {version}" for name, version in run.run_info["versions"].items())
    rows = [*list_state_rows(run), ("versions", versions)]
    episodes = [
        (name, list_lines_with_images(episode), format_ending(episode))
        for name, episode in sample_episodes(run)
    ]
    return render(
        "run.html.jinja", title=f"Run {run.name}", rows=rows, findings=list_findings(run),
        charts=make_charts(run.metrics()), episodes=episodes, config=(run.path / CONFIG).read_text(encoding="utf-8"),
    )  # fmt: skip


def make_charts(metrics: MetricRows) -> list[Chart]:
    candidates = [_make_reward_chart(metrics), _make_heldout_chart(metrics)]
    for title, labels in CURVES.items():
        axis_limits = (0.0, 1.0) if labels.keys() <= SHARE_METRICS else (None, None)
        axis_limits = (0.0, None) if labels.keys() <= ZERO_BASED else axis_limits
        curves = [Curve(label, extract_points(metrics, key)) for key, label in labels.items()]
        candidates.append(Chart(title, curves, *axis_limits))
    return [chart for chart in candidates if chart.curves]


def _make_reward_chart(metrics: MetricRows) -> Chart:
    rows = [row for row in metrics if "reward" in row]
    low, high = (
        [(row["step"], row["reward"] + sign * row.get("reward_std", 0.0)) for row in rows] for sign in (-1, 1)
    )
    return Chart(
        "Reward, with its standard deviation", [Curve("reward", extract_points(rows, "reward"), low, high)]
    )


def _make_heldout_chart(metrics: MetricRows) -> Chart:
    success, low, high = (
        extract_points(metrics, f"eval/success{suffix}") for suffix in ("", "_low", "_high")
    )
    return Chart("Held-out success, with its 95 % interval", [Curve("success", success, low, high)], 0.0, 1.0)


def extract_points(metrics: MetricRows, metric: str) -> list[tuple[float, float]]:
    return [(row["step"], row[metric]) for row in metrics if metric in row]


def sample_episodes(run: RunFolder) -> list[tuple[str, Trajectory]]:
    """Return the best and the worst recorded episode of the first and of the last step."""
    if not (run.path / TRAJECTORIES).is_file() or not (tasks_by_step := run.read_consumed_tasks()):
        return []
    episodes: list[tuple[str, Trajectory]] = []
    for step in dict.fromkeys((min(tasks_by_step), max(tasks_by_step))):
        for rank, episode in pick_best_and_worst(run.episodes(step)).items():
            episodes.append((f"Step {step}, {rank}: task {episode.task.id}", episode))
    return episodes
