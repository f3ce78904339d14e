"""`tfactory runs`: what has been trained, how it went, and going on with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from TrainingFactory.apps.views import run_tables
from TrainingFactory.apps.views import runs as views
from TrainingFactory.apps.views.shapes import RunList, RunRow
from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display, curve, plot
from TrainingFactory.cli.options import Count, Json, Run, Where
from TrainingFactory.evaluation.records import read_records
from TrainingFactory.runs.folder import EVALUATIONS, RunFolder

runs = App(name="runs", help="List, show, compare, stop and resume training runs.")


@runs.command(name="list")
def list_(*, as_json: Json = False, where: Where = "runs") -> None:
    """List the runs, the oldest first.

    ```
    tfactory runs list
    tfactory runs list --runs /data/runs
    ```
    """
    found = views.Runs(where).rows()
    if as_json:
        print(RunList(runs=found).model_dump_json())
    elif found:
        show.columns(("run", "state", "steps", "last", "what"), [_listed(row) for row in found])
    else:
        show.note(f"there are no runs in {where}")


def _listed(row: RunRow) -> tuple[str, ...]:
    if row.state == "unreadable":
        return row.name, row.state, "", "", row.problem or ""
    values = {"eval/success": row.heldout and row.heldout.value, "reward": row.reward, "loss": row.loss}
    last = next((f"{key} {value:.3f}" for key, value in values.items() if value is not None), "")
    what = row.problem or f"{row.algorithm} {row.environment or ''} {row.model}"
    return row.name, row.state, f"{row.step}/{row.steps or '?'}", last, what


@runs.command(name="show")
def show_(name: Run, *, as_json: Json = False, where: Where = "runs") -> None:
    """Show how a run went: its state, its checkpoints, its metrics over time: steps per second, reward, tool-call
    success and accuracy (the success on held-out tasks) first.

    ```
    tfactory runs show grpo-search-1
    ```
    """
    run = RunFolder.find(name, where)
    if as_json:
        print(views.run_view(run, views.Runs(where)).model_dump_json())
        return
    rows = [("run", f"{run.name} in {run.path}"), *run_tables.state_rows(run)]
    rows += [("checkpoint", str(path)) for path in run.checkpoints()]
    if (best := run.best()) is not None:
        rows.append(("best", f"{best}, on held-out tasks or rows"))
    if count := len(read_records(run.path / EVALUATIONS, show.note)):
        rows.append(("evaluations", f"{count} in {run.path / EVALUATIONS}"))
    show.table(rows)
    metrics, table = run.metrics(), []
    for label, key, form in run_tables.named(metrics):
        values = [row[key] for row in metrics if key in row]
        ends = [form.format(value) for value in (values[0], values[-1], min(values), max(values))]
        table.append((label, *ends, curve(values)))
    show.columns(["metric", "first", "last", "least", "most", "curve"], table)
    _plot(metrics)
    show.table(list(run_tables.asked_in_words(metrics)))
    for found in views.findings(run):
        show.note(f"{found.severity}, {found.when}: {found.name}: {found.sentence}. {found.remedy}")
    if run.state in ("interrupted", "failed", "killed"):
        show.note(f"go on with: {run.resume_command}")


def _plot(metrics: run_tables.Rows) -> None:
    """Draw the whole run: what it is judged by, over all its steps."""
    name = next((name for name in ("reward", "loss") if any(name in row for row in metrics)), None)
    if name is None:
        return
    rows = [row for row in metrics if name in row]
    values, form = [row[name] for row in rows], run_tables.FORMATS[name]
    lines = plot(values)
    sides = [form.format(max(values)), *[""] * (len(lines) - 2), form.format(min(values))]
    steps = f"{name}, steps {rows[0]['step']} to {rows[-1]['step']}"
    show.columns(["", steps], list(zip(sides, lines, strict=True)))


@runs.command
def report(name: Run, *, out: Path | None = None, where: Where = "runs") -> None:
    """Write a page about a run: its curves, what was seen going wrong, some episodes, its config. It needs nothing
    beside it.

    ```
    tfactory runs report grpo-search-1
    tfactory runs report grpo-search-1 --out page.html
    ```

    Args:
        out: The HTML file; run.html in the run's folder if none is named.
    """
    from TrainingFactory.apps.views.run_report import run_page

    run = RunFolder.find(name, where)
    show.write_page(out or run.path / "run.html", run_page(run))


@runs.command
def compare(*names: Run, as_json: Json = False, where: Where = "runs") -> None:
    """Compare runs: the options in which they differ, their last metrics, and what judges have been asked in all.

    ```
    tfactory runs compare grpo-search-1 grpo-search-2
    ```

    Args:
        names: Names or folders of two runs or more.
    """
    if len(names) < 2:
        raise ValueError("name two runs or more to compare")
    found = [RunFolder.find(name, where) for name in names]
    differ = views.diff(found)
    if as_json:
        print(differ.model_dump_json())
        return
    metrics = [run.metrics() for run in found]
    last = [run_tables.latest(each) | run_tables.asked(each) for each in metrics]
    forms = run_tables.shown([row for each in metrics for row in each])
    forms |= dict.fromkeys((key for each in metrics for key in run_tables.asked(each)), "{:.6g}")
    rows = [(row["key"], *map(str, row["values"])) for row in differ.rows]
    rows.append(("steps", *(str(run.status.step) for run in found)))
    rows += [(key, *(form.format(f[key]) if key in f else "" for f in last)) for key, form in forms.items()]
    show.columns(["", *(run.name for run in found)], rows)


@runs.command
def episodes(
    name: Run,
    *,
    step: int | None = None,
    task: str | None = None,
    best: Count | None = None,
    worst: Count | None = None,
    show_tasks: Annotated[Count | None, Parameter(name="--show")] = None,
    html: Path | None = None,
    as_json: Json = False,
    where: Where = "runs",
) -> None:
    """Show the episodes of a step with every token coloured by its advantage: what was rewarded, and what was blamed.

    ```
    tfactory runs episodes search
    tfactory runs episodes search --step 12 --task search-7-1212 --best 1 --worst 1
    tfactory runs episodes search --step 12 --html credit.html
    tfactory runs episodes search --step 12 --json
    ```

    With --json and a task, its episodes in full; with --json alone a row for each, up to 1000, of the step or of all.

    Args:
        step: Which step, from 1; the last if none is named, or the last that took the task.
        task: Only the episodes of this task.
        best: Of each task only so many episodes with the highest rewards.
        worst: Of each task only so many with the lowest rewards; with --best both.
        show_tasks: How many tasks, those with the largest advantages first; one on a terminal, all on a
            page.
        html: Write a page with everything to this file, instead of printing it.
    """
    from TrainingFactory.apps.reports.run_credit import choose, credit_title, run_credit
    from TrainingFactory.apps.views.credit import group_credit
    from TrainingFactory.apps.views.index import MOST, EpisodeIndex, Query
    from TrainingFactory.cli import credit as printing

    run = RunFolder.find(name, where)
    if as_json:
        index = EpisodeIndex(run)
        found = (
            group_credit(run, step, task, index)
            if task
            else index.page(Query(step=step, limit=MOST), whole=True)
        )
        print(found.model_dump_json())
        return
    step, credit = run_credit(run, step, task)
    found = [group for group in credit.groups if task is None or group.task == task]
    limit = show_tasks or (1 if html is None and task is None else len(found))
    shown = choose(credit, found[:limit], best, worst)
    title = credit_title(run, step)
    if html is not None:
        show.write_page(html, replace(credit, groups=shown).page(title))
        return
    printing.groups(credit, shown, found)
    for text in (title, *credit.notes):
        show.note(text)


@runs.command
def stop(name: Run, *, where: Where = "runs") -> None:
    """Ask a run that another process trains to save a checkpoint and end, as by Ctrl-C there.

    ```
    tfactory runs stop grpo-search-1
    ```
    """
    from TrainingFactory.runs import stopping

    run = RunFolder.find(name, where)
    pid = stopping.stop(run)
    show.note(f"process {pid} is asked to stop; when it has, go on with: {run.resume_command}")


@runs.command
def resume(name: Run, *, where: Where = "runs") -> int:
    """Go on with a run from its last checkpoint, exactly as if it had not stopped. Its options are those in its
    config.yaml, and none are given here. What does not change what is learned may be edited there before: model.device,
    training.token_budget, training.gradient_checkpointing, sampling.slots, compute.learners, addresses, budgets and
    time-outs in reward.options, reward.max_unscored, reward.max_equal_steps, environment.episode_timeout,
    logging.checkpoint_every. Other changes belong into a new run.

    ```
    tfactory runs resume grpo-search-1
    ```
    """
    from TrainingFactory.assembly.learner_processes import served
    from TrainingFactory.cli.train import follow
    from TrainingFactory.trainers.training_run import resume as resume_run

    if served(None) is not None:
        return 0
    run = RunFolder.find(name, where)
    if run.status.status == "finished":
        show.note(f"run {name} is finished; nothing to do")
        return 0
    display = Display()
    display.earlier(run.metrics())
    return follow(resume_run(name, where, display), display)
