"""`tfactory compare`: paired comparison of models on the same tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from TrainingFactory.cli import show
from TrainingFactory.cli.evaluate import RECORD_COLUMNS, list_cells, run_evaluation
from TrainingFactory.cli.options import Count, Flags, Json, RunsFolder, get_storage_paths
from TrainingFactory.common.texts import escape_control
from TrainingFactory.config.loading import key_value
from TrainingFactory.runs.episode_texts import format_ending, list_conversation_lines
from TrainingFactory.types import Trajectory

if TYPE_CHECKING:
    from TrainingFactory.common.endpoints.budget import Budget
    from TrainingFactory.evaluation.comparison import ComparedModel, Comparison, Flip


def compare(
    *arguments: Annotated[str, Parameter(name="model-or-run")], env: str | None = None, suite: str | None = None,
    episodes: Count | None = None, flags: Flags | None = None,
    show_tasks: Annotated[int, Parameter(name="--show")] = 1, html: Path | None = None, again: bool = False,
    as_json: Json = False, runs_folder: RunsFolder = "runs",
) -> int:  # fmt: skip
    """Compare models with the first one, on the same tasks and with the same random seeds. Recorded evaluations with
    the same conditions are reused.

    ```
    tfactory compare runs/warm runs/grpo-search-1
    tfactory compare qwen3-4b runs/a runs/b --suite release.yaml --html compare.html
    tfactory compare builtin:tiny runs/a --env calculator --tasks 200 --episodes 4 sampling.top_p=0.9
    tfactory compare eval-3c239549c9 eval-90b1f0a2c4
    tfactory compare agent:1 agent@champion --runs /data/runs
    ```

    Args:
        arguments: Models, runs, checkpoints or recorded evaluations (an id, or a file of records, whose last one is
            used); and config overrides for all of them as key=value.
        env: Environment. Default: that of the first listed run that has one.
        suite: YAML file with several environments or task files, or a built-in suite: builtin or quick.
        episodes: Episodes per task.
        show_tasks: Number of flipped tasks to print in each direction, with both episodes.
        html: Write an HTML page with the full comparison to this file.
        again: Repeat evaluations that are already recorded. Evaluations made during training store no episodes.
    """
    from TrainingFactory.evaluation import comparison

    flags = flags or Flags()
    names = [text for text in arguments if "=" not in text or Path(text).exists()]
    if len(names) < 2 or flags.model is not None:
        raise ValueError("name at least two models, runs or recorded evaluations: tfactory compare A B")
    overrides = [*(text for text in arguments if text not in names), *flags.list_overrides()]
    overrides.insert(0, key_value("logging.output_dir", runs_folder))
    if episodes is not None:
        overrides.append(key_value("training.group_size", episodes))
    models, weights = comparison.sides(
        names, overrides, env, suite, show.note, get_storage_paths(overrides)[0], again
    )
    if status := _run_evaluations(models):
        return status
    results = [comparison.compare(models[0], model, weights) for model in models[1:]]
    if html is not None:
        from TrainingFactory.apps.reports.comparison_page import make_comparison_page

        show.write_page(html, make_comparison_page(models, results))
    if as_json:
        print(json.dumps({"comparisons": [result.as_json() for result in results]}))
        return 0
    records = [(model.name, record) for model in models for record in model.records]
    rows = [
        [f"{name} {record.entry or ''}", *list_cells(record, _find_budget(name))] for name, record in records
    ]
    show.print_columns(["model", *RECORD_COLUMNS], rows)
    for result in results:
        _print_comparison(result, show_tasks)
    return 0


def _find_budget(model_name: str) -> Budget | None:
    """Return the prices of a model behind an endpoint, which may be newer than its record."""
    from TrainingFactory.common.endpoints.names import find_endpoint, is_endpoint

    return find_endpoint(model_name).budget if is_endpoint(model_name) else None


def _run_evaluations(models: Sequence[ComparedModel]) -> int:
    """Run the evaluations that have no record yet, and return the exit status."""
    for model in models:
        for evaluation in filter(None, model.evaluations):
            name = f"{model.name} {evaluation.request.entry or ''}".rstrip()
            if status := run_evaluation(evaluation, name):
                return status
        model.collect_records()
    return 0


def _print_comparison(comparison: Comparison, num_shown: int) -> None:
    wins, losses, estimate = comparison.wins, comparison.losses, comparison.difference
    names = f"{comparison.second.name} with {comparison.first.name}"
    rows = [
        ("compared", f"{names}, {show.pluralize(comparison.num_tasks, 'task')}"),
        ("difference", f"{estimate.value:+.3f} (95 % interval {estimate.low:+.3f} to {estimate.high:+.3f})"),
        ("flipped", f"{len(wins)} better, {len(losses)} worse; exact McNemar p = {comparison.p_value:.3g}"),
    ]
    directions = ("better on", wins), ("worse on", losses)
    rows += [(label, _format_task_ids(flips)) for label, flips in directions if flips]
    show.print_table(rows)
    for flip, episodes in comparison.load_episodes([*wins[:num_shown], *losses[:num_shown]]):
        _print_episodes(comparison, flip, episodes)
    for note in comparison.notes:
        show.note(f"note: {note}")


def _format_task_ids(flips: Sequence[Flip], max_shown: int = 20) -> str:
    omitted_note = f" and {len(flips) - max_shown} more" if len(flips) > max_shown else ""
    return ", ".join(flip.task_id for flip in flips[:max_shown]) + omitted_note


def _print_episodes(comparison: Comparison, flip: Flip, episodes: Sequence[Trajectory | None]) -> None:
    console = show.make_console(stderr=False)
    console.print(Rule(Text(escape_control(f"task {flip.task_id}")), align="left"))
    grid = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for model, success in zip((comparison.first, comparison.second), flip.success_rates, strict=True):
        grid.add_column(Text(escape_control(f"{model.name}: {success:g}")), ratio=1, overflow="fold")
    grid.add_row(*map(_render_episode, episodes))
    console.print(grid)


def _render_episode(episode: Trajectory | None) -> Table | Text:
    if episode is None:
        return Text("(no stored episode; run with --again)", style="dim")
    rows = show.make_message_grid()
    for role, text in list_conversation_lines(episode):
        rows.add_row(Text(role, style=show.ROLE_STYLES[role]), show.escape_text(text or "(no text)"))
    rows.add_row("", Text(escape_control(format_ending(episode)), style="bold"))
    return rows
