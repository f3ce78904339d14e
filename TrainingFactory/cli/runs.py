"""`tfactory runs`: list, show, compare, stop and resume training runs. `manage_runs.py` adds delete, tag and others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from TrainingFactory.apps.views import run_tables
from TrainingFactory.apps.views import runs as views
from TrainingFactory.apps.views.shapes import RunList, RunRow
from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display, plot, sparkline
from TrainingFactory.cli.options import Count, Json, RunName, RunsFolder
from TrainingFactory.evaluation.records import read_records
from TrainingFactory.runs.annotations import read_annotations
from TrainingFactory.runs.folder import EVALUATIONS, RunFolder

runs = App(name="runs", help="List, show, compare, stop, resume, tag and delete training runs.")


@runs.command(name="list")
def list_(*, archived: bool = False, as_json: Json = False, runs_folder: RunsFolder = "runs") -> None:
    """List the runs, oldest first.

    ```
    tfactory runs list
    tfactory runs list --runs /data/runs
    ```

    Args:
        archived: Include archived runs. --json always prints all of them.
    """
    rows = views.Runs(runs_folder).list_rows()
    if as_json:
        print(RunList(runs=rows).model_dump_json())
        return
    shown_runs = [row for row in rows if archived or not row.archived]
    if shown_runs:
        show.print_columns(
            ("run", "state", "steps", "last", "description"), [_make_run_cells(row) for row in shown_runs]
        )
    else:
        show.note(f"no runs in {runs_folder}")
    if num_archived := len(rows) - len(shown_runs):
        show.note(f"{show.pluralize(num_archived, 'archived run')} hidden; show with --archived")


def _make_run_cells(row: RunRow) -> tuple[str, ...]:
    if row.state == "unreadable":
        return row.name, row.state, "", "", row.problem or ""
    values = {"eval/success": row.heldout and row.heldout.value, "reward": row.reward, "loss": row.loss}
    metric_text = next((f"{key} {value:.3f}" for key, value in values.items() if value is not None), "")
    tags = "".join(f" [{name}={value}]" if value else f" [{name}]" for name, value in row.tags.items())
    description = row.problem or f"{row.algorithm} {row.environment or ''} {row.model}{tags}"
    return row.name, row.state, f"{row.step}/{row.steps or '?'}", metric_text, description


@runs.command(name="show")
def show_(name: RunName, *, as_json: Json = False, runs_folder: RunsFolder = "runs") -> None:
    """Show a run's state, checkpoints, findings and metrics over time. Throughput, reward, tool-call success and
    accuracy (success on held-out tasks) come first.

    ```
    tfactory runs show grpo-search-1
    ```
    """
    run = RunFolder.find(name, runs_folder)
    if as_json:
        print(views.make_run_view(run, views.Runs(runs_folder)).model_dump_json())
        return
    rows = [("run", f"{run.name} in {run.path}"), *run_tables.list_state_rows(run)]
    rows += [("checkpoint", str(path)) for path in run.checkpoints()]
    if (best_checkpoint := run.best()) is not None:
        rows.append(("best", f"{best_checkpoint}, on held-out tasks or rows"))
    rows += [(name, value) for name, value in _make_annotation_rows(run) if value]
    if num_records := len(read_records(run.path / EVALUATIONS, show.note)):
        rows.append(("evaluations", f"{num_records} in {run.path / EVALUATIONS}"))
    show.print_table(rows)
    metrics, metric_rows = run.metrics(), []
    for label, key, number_format in run_tables.label_metrics(metrics):
        values = [row[key] for row in metrics if key in row]
        statistics = [
            number_format.format(value) for value in (values[0], values[-1], min(values), max(values))
        ]
        metric_rows.append((label, *statistics, sparkline(values)))
    show.print_columns(["metric", "first", "last", "min", "max", "curve"], metric_rows)
    _print_plot(metrics)
    show.print_table(list(run_tables.format_usage(metrics)))
    for finding in views.list_findings(run):
        show.note(f"{finding.severity}, {finding.when}: {finding.name}: {finding.sentence}. {finding.remedy}")
    if run.state in ("interrupted", "failed", "killed"):
        show.note(f"resume with: {run.resume_command}")


def _make_annotation_rows(run: RunFolder) -> list[tuple[str, str]]:
    annotations = read_annotations(run)
    tags = [f"{name}={value}" if value else name for name, value in annotations.tags.items()]
    archived_text = "yes" if annotations.archived else ""
    return [("tags", ", ".join(tags)), ("note", annotations.note), ("archived", archived_text)]


def _print_plot(metrics: run_tables.MetricRows) -> None:
    """Print a plot of the reward, or of the loss if there is none, over all steps."""
    name = next((name for name in ("reward", "loss") if any(name in row for row in metrics)), None)
    if name is None:
        return
    rows = [row for row in metrics if name in row]
    values, number_format = [row[name] for row in rows], run_tables.METRIC_FORMATS[name]
    lines = plot(values)
    axis_labels = [
        number_format.format(max(values)),
        *[""] * (len(lines) - 2),
        number_format.format(min(values)),
    ]
    title = f"{name}, steps {rows[0]['step']} to {rows[-1]['step']}"
    show.print_columns(["", title], list(zip(axis_labels, lines, strict=True)))


@runs.command
def report(name: RunName, *, out: Path | None = None, runs_folder: RunsFolder = "runs") -> None:
    """Write a self-contained HTML report of a run: curves, findings, sample episodes and the config.

    ```
    tfactory runs report grpo-search-1
    tfactory runs report grpo-search-1 --out page.html
    ```

    Args:
        out: HTML file to write. Default: run.html in the run's folder.
    """
    from TrainingFactory.apps.views.run_report import render_run_page

    run = RunFolder.find(name, runs_folder)
    show.write_page(out or run.path / "run.html", render_run_page(run))


@runs.command
def compare(*names: RunName, as_json: Json = False, runs_folder: RunsFolder = "runs") -> None:
    """Compare runs: differing options, last metrics, and total judge requests and cost.

    ```
    tfactory runs compare grpo-search-1 grpo-search-2
    ```

    Args:
        names: Names or folders of at least two runs.
    """
    if len(names) < 2:
        raise ValueError("nothing to compare. Name at least two runs: tfactory runs compare A B")
    folders = [RunFolder.find(name, runs_folder) for name in names]
    diff = views.diff_runs(folders)
    if as_json:
        print(diff.model_dump_json())
        return
    histories = [run.metrics() for run in folders]
    last_values = [run_tables.merge_metrics(history) | run_tables.sum_usage(history) for history in histories]
    formats = run_tables.select_metrics([row for history in histories for row in history])
    formats |= dict.fromkeys(
        (key for history in histories for key in run_tables.sum_usage(history)), "{:.6g}"
    )
    rows = [(row["key"], *map(str, row["values"])) for row in diff.rows]
    rows.append(("steps", *(str(run.status.step) for run in folders)))
    for key, number_format in formats.items():
        rows.append((key, *(number_format.format(row[key]) if key in row else "" for row in last_values)))
    show.print_columns(["", *(run.name for run in folders)], rows)


@runs.command
def episodes(
    name: RunName, *, step: int | None = None, task: str | None = None, best: Count | None = None,
    worst: Count | None = None, show_tasks: Annotated[Count | None, Parameter(name="--show")] = None,
    html: Path | None = None, as_json: Json = False, runs_folder: RunsFolder = "runs"
) -> None:  # fmt: skip
    """Show the episodes of a step with every token coloured by its advantage: green is reinforced, red discouraged.

    ```
    tfactory runs episodes search
    tfactory runs episodes search --step 12 --task search-7-1212 --best 1 --worst 1
    tfactory runs episodes search --step 12 --html credit.html
    tfactory runs episodes search --step 12 --json
    ```

    --json with --task prints the task's episodes in full; --json alone prints one row per episode, at most 1000.

    Args:
        step: Step number, from 1. Default: the last step, or the last one that sampled the task.
        task: Show only the episodes of this task.
        best: Show only the N episodes with the highest reward of each task.
        worst: Show only the N episodes with the lowest reward of each task; combines with --best.
        show_tasks: Number of tasks, largest advantages first. Default: 1 on a terminal, all in an HTML page.
        html: Write an HTML page to this file instead of printing.
    """
    from TrainingFactory.apps.reports.run_credit import compute_run_credit, make_credit_title, select_episodes
    from TrainingFactory.apps.views.credit import make_group_view
    from TrainingFactory.apps.views.index import MAX_ROWS, EpisodeIndex, Query
    from TrainingFactory.cli import credit as credit_printer

    run = RunFolder.find(name, runs_folder)
    if as_json:
        index = EpisodeIndex(run)
        if task:
            print(make_group_view(run, step, task, index).model_dump_json())
        else:
            print(index.get_page(Query(step=step, limit=MAX_ROWS), read_all=True).model_dump_json())
        return
    step, credit = compute_run_credit(run, step, task)
    groups = [group for group in credit.groups if task is None or group.task == task]
    max_groups = show_tasks or (1 if html is None and task is None else len(groups))
    selected_groups = select_episodes(credit, groups[:max_groups], best, worst)
    title = make_credit_title(run, step)
    if html is not None:
        show.write_page(html, replace(credit, groups=selected_groups).page(title))
        return
    credit_printer.print_groups(credit, selected_groups, groups)
    for text in (title, *credit.notes):
        show.note(text)


@runs.command
def stop(name: RunName, *, runs_folder: RunsFolder = "runs") -> None:
    """Stop a run that another process is training: save a checkpoint and exit, as after Ctrl-C.

    ```
    tfactory runs stop grpo-search-1
    ```
    """
    from TrainingFactory.runs import stopping

    run = RunFolder.find(name, runs_folder)
    pid = stopping.stop_run(run)
    show.note(f"asked process {pid} to stop; after it has exited, resume with: {run.resume_command}")


@runs.command
def resume(name: RunName, *, runs_folder: RunsFolder = "runs") -> int:
    """Resume a run from its last checkpoint, exactly as if it had not stopped.

    Options come from the run's config.yaml, not from the command line. Before resuming you can edit the keys there that
    do not affect learning: model.device, training.token_budget, training.gradient_checkpointing, sampling.slots,
    compute.learners, addresses, budgets and timeouts in reward.options, reward.max_unscored, reward.max_equal_steps,
    environment.episode_timeout, logging.checkpoint_every. For any other change start a new run.

    ```
    tfactory runs resume grpo-search-1
    ```
    """
    from TrainingFactory.assembly.learner_processes import serve_rank
    from TrainingFactory.cli.train import train_with_display
    from TrainingFactory.trainers.training_run import resume as resume_run

    if serve_rank(None) is not None:
        return 0
    run = RunFolder.find(name, runs_folder)
    if run.status.status == "finished":
        show.note(f"run {name} is already finished; nothing to resume")
        return 0
    display = Display()
    display.plot_earlier_steps(run.metrics())
    return train_with_display(resume_run(name, runs_folder, display), display)
